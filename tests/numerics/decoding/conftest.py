"""Fixtures of the decoding tests."""

from tests.support.decoding_cases import drafter, knowing, target

__all__ = ["drafter", "knowing", "target"]
