"""Rows of a file: JSONL, a JSON array or object, gzip or zstd of these, or Parquet, one row at a time.

A row that cannot be parsed is yielded with a rejection, and reading goes on behind it. What cannot be divided
into rows with certainty fails the file: a row is never lost. Memory holds one row, one chunk or one record
batch (limits in `raw_rows.py`), never the file.

Rules: blank lines are skipped and counted; only LF ends a JSONL line (U+2028 and the like do not), and
several objects on one line are several rows; a byte order mark and CR before LF are not part of the text;
invalid UTF-8 or JSON rejects the row under its physical line number, and its number in an array.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import zstandard

from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.json_array import JsonArray
from dflash_core.data.json_structure import Structure, Uncertain
from dflash_core.data.parquet_rows import parquet_rows
from dflash_core.data.raw_rows import BLANK, BOM, RawRow, parse, parse_line, too_large
from dflash_core.data.source_file import SourceFile
from dflash_core.errors import UserError

_BINARY_HEADS = (b"\x89PNG", b"\xff\xd8\xff\xe0", b"GIF8", b"%PDF", b"PK\x03\x04", b"PARE")


def read_rows(
    path: Path,
    *,
    digest: str | None = None,
    limit: int | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[RawRow]:
    """Yield the rows of a file.

    Args:
        path: the file.
        digest: sha256 of the bytes that it should have, checked behind the last row; None: not checked.
        limit: at most this many rows, blank lines not counted.
        columns: columns of Parquet to read; the others are None. None: all.

    Raises:
        UserError: the file cannot be opened, is not one of the containers above, cannot be divided into
            rows, or has changed.
    """
    with SourceFile(path, digest) as source:
        # Kept until the end: a buffer that vanishes closes the file.
        file = io.BufferedReader(source, raw_rows.CHUNK_BYTES)
        try:
            yield from limited(_rows(source, file, columns), limit)
        except (UserError, OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            if digest is not None and source.has_changed():
                raise source.changed_error() from error
            if isinstance(error, UserError):
                raise
            raise source.error(f"cannot be read to its end: {error}") from error
        source.verify()


def limited(rows: Iterable[RawRow], limit: int | None) -> Iterator[RawRow]:
    """Yield the first `limit` rows, and the blank lines between them, which do not count."""
    count = 0
    for row in rows:
        if count == limit:
            return
        count += row.value is not None
        yield row


def _rows(source: SourceFile, file: Any, columns: Collection[str] | None) -> Iterator[RawRow]:
    head = file.peek(4)[:4]
    if head == b"PAR1":
        return parquet_rows(source, columns)
    return _text_rows(source, _decompressed(file, head))


def _decompressed(file: Any, head: bytes) -> io.BufferedReader:
    """Return the file's text. The first bytes decide on the method, not the name."""
    if head[:2] == b"\x1f\x8b":
        return io.BufferedReader(cast(Any, gzip.open(file, "rb")), raw_rows.CHUNK_BYTES)
    # A frame, or a skippable frame before the first one.
    if head == b"\x28\xb5\x2f\xfd" or (head[:1] and head[0] >> 4 == 5 and head[1:] == b"\x2a\x4d\x18"):
        return io.BufferedReader(_ZstdReader(file), raw_rows.CHUNK_BYTES)
    return file


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of all frames. Unlike zstandard's own reader it raises on an incomplete frame."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            # A kilobyte gives at most 32 MB.
            self._compressed = self._compressed or self._file.read(1 << 10)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _text_rows(source: SourceFile, stream: io.BufferedReader) -> Iterator[RawRow]:
    num_blank, first = _skip_blanks(source, stream)
    yield from itertools.repeat(BLANK, num_blank)
    bare = first.removeprefix(BOM).lstrip()
    _reject_binary(source, first)
    if _is_array(source.path, bare, stream):
        yield from JsonArray(f"data.files: {str(source.path)!r}", bare, num_blank + 1, stream).rows()
    elif first.endswith(b"\n") and _is_open_object(first):
        yield from _object_rows(source, first, num_blank, stream)
    else:
        yield from _line_rows(source, first, num_blank, stream)


def _skip_blanks(source: SourceFile, stream: io.BufferedReader) -> tuple[int, bytes]:
    """Return the number of blank lines at the start, and the first line, or the beginning of it."""
    num_blank = num_bytes = 0
    is_cut = False
    while piece := stream.readline(raw_rows.CHUNK_BYTES):
        if piece.removeprefix(BOM).strip():
            return num_blank, piece
        is_cut = not piece.endswith(b"\n")
        num_blank += not is_cut
        num_bytes += len(piece)
        _check_blanks(source, num_bytes)
    return num_blank + is_cut, b""


def _check_blanks(source: SourceFile, num_bytes: int) -> None:
    if num_bytes > raw_rows.MAX_BLANK_BYTES:
        limit = raw_rows.MAX_BLANK_BYTES >> 20
        raise source.error(f"holds over {limit} MiB of blanks in a row; allowed: {limit} MiB")


def _is_array(path: Path, first: bytes, stream: Any) -> bool:
    """Return True if a text is a JSON array; `first` is its first line, or the beginning of it.

    A file named like JSON lines may still hold an array, unless its first line is a complete array,
    or plain text.
    """
    if not first.startswith(b"["):
        return False
    if not {suffix.lower() for suffix in path.suffixes} & {".jsonl", ".ndjson"}:
        return True
    if isinstance(parse(first), Rejection):  # "[1, 2]" is rejected too: it is not an object
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return first[1:].lstrip()[:1] in (b"", b"{")
    return not stream.peek(1).strip()


def _reject_binary(source: SourceFile, first: bytes) -> None:
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise source.error("is UTF-16 or UTF-32; allowed: UTF-8")
    if b"\0" in first[:4096] or first[:4] in _BINARY_HEADS:
        raise source.error("is binary; allowed: JSONL, JSON array, gzip or zstd of these, Parquet")


def _is_open_object(text: bytes) -> bool:
    """Return True if a text begins an object that continues behind it."""
    text = text.removeprefix(BOM).strip()
    structure = Structure()
    try:
        return text.startswith(b"{") and structure.scan(text, 0) is None and structure.is_open
    except Uncertain:
        return False


def _object_rows(source: SourceFile, first: bytes, number: int, stream: Any) -> Iterator[RawRow]:
    """Yield one row if the text is one object over several lines; else it is JSON lines."""
    text = first + stream.read(max(0, raw_rows.MAX_ROW_BYTES - len(first)))
    value = parse(text)
    if isinstance(value, dict) and not stream.peek(1):
        yield RawRow(number + 1, value)
        return
    if stream.peek(1) and _is_open_object(text):
        limit = raw_rows.MAX_ROW_BYTES >> 20
        raise source.error(
            f"is one JSON object of over {limit} MiB; allowed: JSON lines, or an array of rows"
        )
    yield from _line_rows(source, b"", number, _Rejoined(text, stream))


class _Rejoined:
    """Lines of some bytes followed by a stream."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = io.BytesIO(head), stream

    def readline(self, size: int) -> bytes:
        line = self._head.readline(size)
        is_whole = line.endswith(b"\n") or len(line) >= size
        return line if is_whole else line + self._stream.readline(size - len(line))


def _line_rows(source: SourceFile, first: bytes, number: int, stream: Any) -> Iterator[RawRow]:
    """Yield the rows of JSON lines: `first` begins the first one, `number` lines were read before."""
    num_blank_bytes = 0
    limit = raw_rows.MAX_ROW_BYTES
    line = first if first.endswith(b"\n") else first + stream.readline(limit)
    while line:
        number += 1
        if len(line) >= limit and not line.endswith(b"\n"):
            while (rest := stream.readline(raw_rows.CHUNK_BYTES)) and not rest.endswith(b"\n"):
                pass
            values = [too_large()]
        else:
            values = parse_line(line)
        for value in values:
            yield BLANK if value is None else RawRow(number, value)
        num_blank_bytes = 0 if values != [None] else num_blank_bytes + len(line)
        if num_blank_bytes > raw_rows.MAX_BLANK_BYTES:
            _check_blanks(source, num_blank_bytes)
        line = stream.readline(limit)
