"""Elements of JSON arrays: each is a row, or the file fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows
from dflash_core.data.json_structure import Structure
from dflash_core.errors import UserError
from tests.support.container_rows import reasons_of, rows_of, write


def test_an_invalid_array_element_rejects_only_itself(tmp_path: Path) -> None:
    content = b'\n[\n  {"a": "}],{"},\n  {"a": nope},\n  {"a":\n   [2, {"b": "\\""}]}\n, 7]\n'
    rows = rows_of(tmp_path / "x.json", content)
    assert [(line, v) for line, v in rows if isinstance(v, dict)] == [
        (3, {"a": "}],{"}),
        (5, {"a": [2, {"b": '"'}]}),
    ]
    assert reasons_of(rows) == [(4, "invalid JSON"), (7, "not a JSON object")]


@pytest.mark.parametrize("content", [b"[]", b" [ ] \n", b'\xef\xbb\xbf[{"a": 1}]'])
def test_small_arrays(tmp_path: Path, content: bytes) -> None:
    assert rows_of(tmp_path / "x.json", content) == ([(1, {"a": 1})] if b"a" in content else [])


LONG = [{"a": f"row {n}", "b": [n]} for n in range(1000)]


def one_per_line(rows: list[Any], bad: dict[int, bytes]) -> bytes:
    """Return an array of one element per line, some replaced by other bytes."""
    return b"[\n" + b",\n".join(bad.get(n, json.dumps(row).encode()) for n, row in enumerate(rows)) + b"\n]\n"


@pytest.mark.parametrize(
    "bad",
    [
        b'{"a": "A 5" screen", "b": [1]}',
        # a bracket that never closes, or closes twice, or in the wrong order
        b'{"a": "x", "b": [1]',
        b'{"a": "x", "b": [1]}}',
        b'{"a": "x", "b": [1}]}',
        b'{"a": "x", "b": [1]]}',
        # an open string, a text that ends with a backslash, text that looks like the end of the array
        b'{"a": "x, "b": [1]}',
        b'{"a": "C:\\", "b": [1]}',
        b'{"a": "say "hi", ok"}, {"b": "]"]}',
    ],
)
def test_one_element_per_line_resumes_at_the_next_line(tmp_path: Path, bad: bytes) -> None:
    for position in (0, 1, 500, 998):
        content = one_per_line(LONG, {position: bad})
        rows = list(read_rows(write(tmp_path / "x.json", content)))
        values = [row.value for row in rows if isinstance(row.value, dict)]
        assert values == LONG[:position] + LONG[position + 1 :]
        [rejected] = [row for row in rows if isinstance(row.value, Rejection)]
        assert rejected.value.reason == "invalid JSON"
        assert (rejected.line, rejected.element) == (position + 2, position + 1)
        assert [row.element for row in rows] == list(range(1, 1001))


def test_neighbouring_invalid_lines_are_one_row_each(tmp_path: Path) -> None:
    """Two stray quotes would make one string of everything between them."""
    bad = dict.fromkeys((3, 4, 5, 20, 999), b'{"a": "A 5" screen"}')
    rows = list(read_rows(write(tmp_path / "x.json", one_per_line(LONG, bad))))
    assert [row.element for row in rows if isinstance(row.value, Rejection)] == [4, 5, 6, 21, 1000]
    assert len(rows) == 1000


def test_a_missing_comma_between_lines_loses_nothing(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "x.json", b'[{"a": 1}\n{"a": 2},\n{"a": 3}]')
    assert rows == [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        # cut
        (b'[{"a": 1},\n{"a": 2', r"element 2 \(line 2\) on: it breaks off"),
        (b'[{"a": 1},\n{"a": "2', r"element 2 \(line 2\) on: it breaks off"),
        (b'[{"a": 1}\n', r"element 2 \(line 2\) on: it breaks off"),
        (b'[{"a": 1},\n', r"element 2 \(line 2\) on: it breaks off"),
        (b'[{"a": 1},\n{"a": 5" x"},\n{"a": 2},\n', r"element 4 \(line 4\) on: it breaks off"),
        (b"[", r"element 1 \(line 1\) on: it breaks off"),
        # where the next element starts is not certain: one line, or elements of several lines
        (b'[{"a": "5" x"}, {"a": 1}, {"a": "6" x"}, {"a": 2}]', r"element 1 \(line 1\) on: "),
        (b'[{"a": 1}, {"a": [2}, {"a": 3}]', r"element 2 \(line 1\) on: '\[' is closed by '}'"),
        (b'[{"a": 1}, {"a": 2, {"a": 3}]', r"element 2 \(line 1\) on: "),
        (b'[{"a": 1} {"a": 2}]', r"element 1 \(line 1\) on: "),
        (b'[\n{"a":\n1},\n{"a": "5" x"},\n{"a": 2}\n]', r"element 2 \(line 4\) on: "),
        (b'[\n{"m": 1},\n{"m": [\n{"c": "5" x"},\n{"c": 2}\n]},\n{"m": 3}\n]', r"element 2 \(line 3\) on: "),
        (b'[{"a": 1},\n{"a": "5" x"}]', r"element 2 \(line 2\) on: "),
    ],
)
def test_an_array_without_certain_rows_fails_the_file(tmp_path: Path, content: bytes, place: str) -> None:
    with pytest.raises(
        UserError, match=f"data.files: '.*x.json': the JSON array cannot be read from {place}"
    ):
        rows_of(tmp_path / "x.json", content)


@pytest.mark.parametrize("rest", [b'[{"a": 2}]', b'{"a": 2}\n', b"]", b"\n\nx", b", 1]"])
def test_text_behind_an_array_fails_the_file(tmp_path: Path, rest: bytes) -> None:
    line = 1 + rest.count(b"\n\n") * 2
    with pytest.raises(UserError, match=f"text behind the JSON array, line {line}: "):
        rows_of(tmp_path / "x.json", b'[{"a": 1}]' + rest)


def test_an_empty_element_is_rejected(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "x.json", b'[{"a": 1},,{"a": 2}, ]')
    assert rows[0] == (1, {"a": 1})
    assert reasons_of(rows) == [(1, "invalid JSON")]
    assert len(rows) == 3


def test_elements_of_one_line_have_numbers(tmp_path: Path) -> None:
    rows = list(read_rows(write(tmp_path / "x.json", b'[{"a": 1}, 7, {"a": nope}]')))
    assert [row.place for row in rows] == [f"line 1, element {n}" for n in (1, 2, 3)]
    assert [isinstance(row.value, Rejection) for row in rows] == [False, True, True]


def test_chunk_borders_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"a": "x" * n, "b": ['"', "\\", {"c": "}]"}], "n": n} for n in range(40)]
    content = json.dumps(values, indent=1).encode()
    for chunk in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(raw_rows, "CHUNK_BYTES", chunk)
        rows = rows_of(tmp_path / "x.json", content)
        assert [value for _, value in rows] == values
        assert [line for line, _ in rows] == [2 + 11 * n for n in range(40)]


@pytest.mark.parametrize("separator", [b",", b",\n"])
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_an_element_beyond_the_limit_is_rejected_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, separator: bytes
) -> None:
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", chunk)
    large = [b'{"a": "' + b"x" * 500 + b'"}', json.dumps({"a": ['"\\' * 40, {"b": "]}," * 40}]}).encode()]
    for element in large:
        content = b"[\n" + separator.join([b'{"a": 0}', element, b'{"a": 2}', element]) + b"]"
        rows = list(read_rows(write(tmp_path / "x.json", content)))
        assert [row.value for row in rows[::2]] == [{"a": 0}, {"a": 2}]
        assert [row.value.reason for row in rows[1::2]] == ["row too large"] * 2
        lines = [2, 3, 4, 5] if separator == b",\n" else [2, 2, 2, 2]
        assert [(row.line, row.element) for row in rows] == [(line, n + 1) for n, line in enumerate(lines)]


def test_a_large_element_without_a_certain_end_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", 16)
    content = b'[\n{"a": 1},\n{"a": "' + b"x" * 500 + b'5" wide"},\n{"a": 2}\n]'
    with pytest.raises(UserError, match=r"element 2 \(line 3\) on: text next to a string"):
        list(read_rows(write(tmp_path / "x.json", content)))


def test_a_thousand_invalid_lines_take_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one may be followed no further than two chunks."""
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", 1 << 12)
    scanned = 0
    scan = Structure.scan

    def counted(structure: Structure, data: bytes, position: int) -> int | None:
        nonlocal scanned
        scanned += len(data) - position
        return scan(structure, data, position)

    monkeypatch.setattr(Structure, "scan", counted)
    for bad in (b'{"a": "A 5" screen"}', b'{"a": [1]', b'{"a": "x}'):
        scanned = 0
        rows = [{"a": "x" * 50}] * 20_000
        content = one_per_line(rows, dict.fromkeys(range(0, 20_000, 20), bad))
        rejected = [
            row for row in read_rows(write(tmp_path / "x.json", content)) if isinstance(row.value, Rejection)
        ]
        assert [row.element for row in rejected] == list(range(1, 20_001, 20))
        assert scanned <= 1000 * 4 * raw_rows.CHUNK_BYTES
