"""Ends of JSON values, and which of them are certain."""

from __future__ import annotations

import json

import pytest

from dflash_core.data.json_structure import Structure, Uncertain, is_one_value

CERTAIN = [
    b"1", b'"a"', b"{}", b"[]", b" nope ", b"not a value", b'{"a": nope}', b'{"a": }', b'{"a": 1,}', b"[,]",
    b'{"a": "\\q"}', b'{"a": "\xff"}', b"{'a': 'b'}", b"{a: 1}", b"{a b: c d}",
    b'{"a": 1,, "b": 2}', b'{"a": "]}, \\" {"}',
    b"[[[1], {}], [2]]", b'{"a": "\\\\"}',
]  # fmt: skip
UNCERTAIN = [
    b'{"a": "A 5" screen"}', b'{"a": "x"y}', b'{"a": x"y"}', b'{"a": "x}', b"{", b"[1", b"{]", b"[}", b"[{]}",
    b"{} {}", b"{} x", b"x {}", b"[] []", b'"a" "b"', b'{"a": "C:\\"}', b'{"a": {"b": 1, {"c": 2}}}', b"a: b",
    b"{{}}", b"1, 2", b'{"a"}', b'{"a", "b": 1}', b'["a": 1]', b'{"a": 1: 2}', b"{[1]: 2}", b"1]", b"}",
    b'{"a": "x\n"}',
]  # fmt: skip


@pytest.mark.parametrize("text", CERTAIN)
def test_a_value_whose_brackets_and_strings_are_in_order_has_a_certain_end(text: bytes) -> None:
    assert is_one_value(text)


@pytest.mark.parametrize("text", UNCERTAIN)
def test_any_other_value_has_none(text: bytes) -> None:
    assert not is_one_value(text)


@pytest.mark.parametrize("text", [*CERTAIN, *UNCERTAIN, json.dumps({"a": ['"\\', {"b": ["\\\\"]}]}).encode()])
def test_pieces_of_any_size_give_the_same_end(text: bytes) -> None:
    def outcome(size: int) -> int | str | None:
        structure, content = Structure(), text + b", 2]"
        try:
            for start in range(0, len(content), size):
                end = structure.scan(content[start : start + size], 0)
                if end is not None:
                    return start + end
        except Uncertain as reason:
            return str(reason)
        return None

    assert {outcome(size) for size in (1, 2, 3, 7)} == {outcome(1000)}
