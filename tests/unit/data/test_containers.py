"""Rows of files: rows, blank lines, and the physical lines of rejected rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows
from dflash_core.errors import UserError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def rows_of(path: Path, content: bytes) -> list[tuple[Any, Any]]:
    return [(row.line, row.value) for row in read_rows(write(path, content))]


def reasons_of(rows: list[tuple[Any, Any]]) -> list[tuple[Any, str]]:
    return [(line, value.reason) for line, value in rows if isinstance(value, Rejection)]


def test_json_lines_with_every_kind_of_dirt(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf"  # byte order mark
        b'{"a": 1}\r\n'
        b"\n"
        b"   \r\n"
        b'{"a": "line\xe2\x80\xa8separator"}\n'  # U+2028 does not end a line
        b'{"a": "cut\n'
        b'{"a": "\xff"}\n'
        b"[1, 2]\n"
        b'{"a": 2}'  # no newline at the end
    )
    rows = rows_of(tmp_path / "x.jsonl", content)
    assert [line for line, _ in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [v for _, v in rows if isinstance(v, dict)] == [{"a": 1}, {"a": "line\u2028separator"}, {"a": 2}]
    assert [line for line, value in rows if value is None] == [2, 3]
    assert reasons_of(rows) == [(5, "invalid JSON"), (6, "invalid UTF-8"), (7, "not a JSON object")]


def test_a_byte_order_mark_inside_joined_files_is_not_text(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "x.jsonl", b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n')
    assert rows == [(1, {"a": 1}), (2, {"a": 2})]


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


def test_compression_is_detected_by_the_first_bytes(tmp_path: Path) -> None:
    plain = b'{"a": 1}\n{"a": 2}\n'
    frames = zstandard.compress(plain[:9]) + zstandard.compress(plain[9:])
    expected = [(1, {"a": 1}), (2, {"a": 2})]
    assert rows_of(tmp_path / "x.jsonl.gz", gzip.compress(plain)) == expected
    assert rows_of(tmp_path / "x.jsonl.zst", frames) == expected
    assert rows_of(tmp_path / "misnamed.jsonl", gzip.compress(plain)) == expected
    assert rows_of(tmp_path / "x.json.gz", gzip.compress(b'[{"a": 1},\n{"a": 2}]')) == expected


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_in_a_file_named_like_json_lines(tmp_path: Path, indent: int | None) -> None:
    rows = rows_of(tmp_path / "x.jsonl", json.dumps([{"a": 1}, {"a": 2}], indent=indent).encode() + b"\n")
    assert [value for _, value in rows] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("first", [b"[2026-01-01] started", b"[1, 2]", b'[{"a": 0}]'])
def test_json_lines_whose_first_line_starts_like_an_array(tmp_path: Path, first: bytes) -> None:
    rows = rows_of(tmp_path / "x.jsonl", first + b'\n{"a": 1}\n')
    assert [(line, isinstance(value, Rejection)) for line, value in rows] == [(1, True), (2, False)]


def test_broken_deflate_data_is_named(tmp_path: Path) -> None:
    lines = (json.dumps({"a": n * n}).encode() + b"\n" for n in range(2000))
    content = bytearray(gzip.compress(b"".join(lines)))
    seen = set()
    for position in range(20, 400, 7):
        broken = bytearray(content)
        broken[position] ^= 0xFF
        with pytest.raises(UserError, match="x.gz.*cannot be read to its end: ") as failure:
            rows_of(tmp_path / "x.gz", bytes(broken))
        seen.add(type(failure.value.__cause__).__name__)
    assert "error" in seen  # zlib.error is not an OSError


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_a_cut_compressed_file_is_named(tmp_path: Path, name: str) -> None:
    plain = b"".join(json.dumps({"a": str(n) * 50}).encode() + b"\n" for n in range(500))
    whole = gzip.compress(plain) if name.endswith("gz") else zstandard.compress(plain)
    with pytest.raises(UserError, match=f"{name}.*cannot be read to its end"):
        rows_of(tmp_path / name, whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe{\0", "UTF-16"), (b"\x89PNG\r\n\x1a\n\0\0", "binary"), (b"abc\0def", "binary")],
)
def test_other_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rows_of(tmp_path / "x.jsonl", content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.jsonl"):
        list(read_rows(tmp_path / "none.jsonl"))


def test_a_row_beyond_the_limit_is_rejected_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", 16)
    rows = rows_of(tmp_path / "x.jsonl", b'{"a": 0}\n{"a": "' + b"x" * 500 + b'"}\n{"a": 2}\n')
    assert [value for _, value in rows if isinstance(value, dict)] == [{"a": 0}, {"a": 2}]
    assert reasons_of(rows) == [(2, "row too large")]


def test_parquet_of_large_types_and_structs(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    turns = [[{"role": "user", "content": f"q{n}"}] for n in range(1000)]
    table = pa.table({"messages": pa.array(turns, pa.large_list(turn)), "n": pa.array(range(1000))})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=300)
    rows = [(row.element, row.value) for row in read_rows(tmp_path / "x.parquet")]
    assert rows == [(n + 1, {"messages": turns[n], "n": n}) for n in range(1000)]


def test_nulls_added_by_arrow_are_removed(tmp_path: Path) -> None:
    """Parquet has one schema for all rows: each call would get the arguments of every other call."""
    calls = [
        [{"name": "f", "arguments": {"x": 1}}],
        [{"name": "g", "arguments": {"y": [{"z": "s"}, {"w": 2}]}}],
    ]
    rows = [{"messages": [{"role": "assistant", "content": None, "tool_calls": call}]} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [row.value for row in read_rows(tmp_path / "x.parquet")] == rows


def test_invalid_utf8_in_parquet_rejects_its_row(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0")
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"text": bad}), tmp_path / "x.parquet")
    rows = [(row.element, row.value) for row in read_rows(tmp_path / "x.parquet")]
    assert [rows[0], rows[2]] == [(1, {"text": "a"}), (3, {"text": "b"})]
    assert reasons_of(rows) == [(2, "invalid UTF-8")]


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "whole.parquet")
    path = tmp_path / "cut.parquet"
    path.write_bytes((tmp_path / "whole.parquet").read_bytes()[:500])
    with pytest.raises(UserError, match="cut.parquet.*Parquet"):
        list(read_rows(path))
