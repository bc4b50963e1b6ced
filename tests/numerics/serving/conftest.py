"""Fixtures of the serving tests."""

from tests.support.decoding_cases import drafter, knowing, target

__all__ = ["drafter", "knowing", "target"]
