"""Digests of contents."""

from __future__ import annotations

from dflash_core.files import content_digest


def test_digest_ignores_the_order_of_keys() -> None:
    assert content_digest({"a": 1, "b": [2, 3]}) == content_digest({"b": [2, 3], "a": 1})
    assert content_digest({"a": 1}) != content_digest({"a": "1"})
    assert content_digest([1, 2]) != content_digest([2, 1])
