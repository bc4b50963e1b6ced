"""Rows of files: rows, blank lines, and the physical lines of rejected rows."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows
from dflash_core.errors import UserError
from tests.support.container_rows import reasons_of, rows_of, write


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
    assert [line for line, _ in rows] == [1, None, None, 4, 5, 6, 7, 8]
    assert [v for _, v in rows if isinstance(v, dict)] == [{"a": 1}, {"a": "line\u2028separator"}, {"a": 2}]
    assert [rows[i][1] for i in (1, 2)] == [None, None]
    assert reasons_of(rows) == [(5, "invalid JSON"), (6, "invalid UTF-8"), (7, "not a JSON object")]


def test_a_byte_order_mark_inside_joined_files_is_not_text(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "x.jsonl", b'{"a": 1}\n\xef\xbb\xbf{"a": 2}\n')
    assert rows == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
    "line", [b'{"a": 1}{"a": 2}', b'{"a": 1} \r {"a": 2} ', b'\xef\xbb\xbf{"a": 1}\t{"a": 2}']
)
def test_objects_on_one_line_are_rows(tmp_path: Path, line: bytes) -> None:
    rows = rows_of(tmp_path / "x.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 3}\n')
    assert rows == [(1, {"a": 0}), (2, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]


@pytest.mark.parametrize("line", [b'{"a": 1},', b'{"a": 1}{"a": 2}x', b'{"a": 1}{"a": }', b'{"a": 1}[]'])
def test_other_text_behind_an_object_rejects_its_line_alone(tmp_path: Path, line: bytes) -> None:
    rows = rows_of(tmp_path / "x.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 3}\n')
    assert reasons_of(rows) == [(2, "invalid JSON")]
    assert len(rows) == 3


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_name_that_occurs_twice_rejects_the_row(tmp_path: Path, name: str) -> None:
    texts = [b'{"a": 0}', b'{"a": {"b": 1, "c": 2, "b": 3}}', b'{"a": {"b": 1}, "b": {"a": 2}}']
    content = b"[" + b",".join(texts) + b"]" if name == "x.json" else b"\n".join(texts)
    values = [value for _, value in rows_of(tmp_path / name, content)]
    assert values[1] == Rejection("invalid JSON", "the name 'b' occurs twice in one object")
    assert [values[0], values[2]] == [{"a": 0}, {"a": {"b": 1}, "b": {"a": 2}}]


def test_a_skippable_frame_may_come_first(tmp_path: Path) -> None:
    content = b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(b'{"a": 1}\n')
    assert rows_of(tmp_path / "x.zst", content) == [(1, {"a": 1})]


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


def test_a_million_blank_lines_take_linear_time(tmp_path: Path) -> None:
    """Quadratic work would take minutes."""
    path = write(tmp_path / "x.json", b"\n" * 1_000_000 + b'[{"a": 1}]')
    num_blank, found = 0, []
    for row in read_rows(path):
        if row.value is None:
            num_blank += 1
        else:
            found.append((row.line, row.value))
    assert num_blank == 1_000_000
    assert found == [(1_000_001, {"a": 1})]


@pytest.mark.parametrize("blank", [b" ", b"\n", b" \r\n\t"])
@pytest.mark.parametrize(
    ("before", "behind"), [(b"", b""), (b'{"a": 1}\n', b'{"a": 2}\n'), (b"[", b"]"), (b'[{"a": 1},', b"{}]")]
)
def test_blanks_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes, before: bytes, behind: bytes
) -> None:
    monkeypatch.setattr(raw_rows, "MAX_BLANK_BYTES", 1 << 20)
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 1 << 20)
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", 1 << 16)
    content = before + blank * ((2 << 20) // len(blank)) + behind
    path = write(tmp_path / "x.gz", gzip.compress(content, 1))
    if blank == b" " and before.startswith(b"{"):
        # One line: it is a row that is too large.
        assert [(row.line, row.value is None) for row in read_rows(path)] == [(1, False), (2, False)]
        return
    with pytest.raises(UserError, match="x.gz'.* over 1 MiB of blanks"):
        list(read_rows(path))


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x"])
@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("head", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_of_one_object_is_one_row(tmp_path: Path, name: str, indent: int | None, head: bytes) -> None:
    value = {"messages": [{"role": "user", "content": 'a "q" {'}], "id": 1}
    content = head + json.dumps(value, indent=indent).encode()
    for end in (b"", b"\n", b"\r\n\n"):
        rows = rows_of(tmp_path / name, content + end)
        assert [(line, v) for line, v in rows if v is not None] == [(1 + head.count(b"\n"), value)]


@pytest.mark.parametrize("first", [b'{"messages": [', b"{", b'{"a": {"b": 1},'])
def test_json_lines_whose_first_row_is_cut_at_a_bracket(tmp_path: Path, first: bytes) -> None:
    rows = rows_of(tmp_path / "x.jsonl", b"\n" + first + b'\n{"a": 1}\n{"a": 2}')
    assert reasons_of(rows) == [(2, "invalid JSON")]
    assert [(line, value) for line, value in rows[2:]] == [(3, {"a": 1}), (4, {"a": 2})]


def test_an_object_beyond_the_limit_fails_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 200)
    content = json.dumps({"a": list(range(100))}, indent=1).encode()
    with pytest.raises(UserError, match="x.json' is one JSON object of over"):
        rows_of(tmp_path / "x.json", content)


def test_a_small_compressed_file_gives_its_text_in_pieces(tmp_path: Path) -> None:
    """100 MB of one letter are 10 kB of zstd: reading them holds a part."""
    content = b'{"a": 1}\n' + b"x" * (100 << 20) + b'\n{"a": 2}\n'
    path = write(tmp_path / "x.zst", zstandard.compress(content))
    tracemalloc.start()
    rows = [row.value for row in read_rows(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [rows[0], rows[2]] == [{"a": 1}, {"a": 2}]
    assert rows[1].reason == "row too large"
    assert peak < 3 * raw_rows.MAX_ROW_BYTES
