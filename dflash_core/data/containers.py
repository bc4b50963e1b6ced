"""Rows of a file: JSONL, a JSON array, gzip or zstd of these, or Parquet, one row at a time.

A reader yields `RawRow`s in file order and never raises because of a row's content: a row that cannot be
parsed is yielded with a rejection. Memory holds one row, one chunk or one record batch, never the file.

Rules: blank lines are skipped and counted; only LF ends a JSONL row (U+2028 and the like do not); a byte
order mark and CR before LF are not part of the text; invalid UTF-8 or JSON rejects the row under its
physical line number.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dflash_core.data.chat import Rejection
from dflash_core.errors import UserError

MAX_ROW_BYTES = 64 << 20
_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
# A string, an object of nothing but strings and numbers, a bracket or comma, or the start of an
# unfinished string.
_TOKEN = re.compile(rb'%b|\{(?:[^"{}\[\]]++|%b)*+\}|[{}\[\],]|"' % (_STRING, _STRING), re.DOTALL)
_BINARY_HEADS = (b"\x89PNG", b"\xff\xd8\xff\xe0", b"GIF8", b"%PDF", b"PK\x03\x04", b"PARE")


@dataclass(frozen=True)
class RawRow:
    """One row: its physical line (Parquet: row number, from 1) and its value.

    The value is a mapping, a Rejection, or None for a blank line.
    """

    line: int
    value: Any


def read_rows(path: Path) -> Iterator[RawRow]:
    """Yield all rows of a file.

    Raises:
        UserError: the file cannot be opened, or is not one of the containers above.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UserError(f"data.files: {str(path)!r} cannot be read: {error}") from error
    if head == b"PAR1":
        yield from _parquet_rows(path)
        return
    try:
        with _open_stream(path, head) as stream:
            yield from _text_rows(path, stream)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"data.files: {str(path)!r} cannot be read to its end: {error}") from error


def _open_stream(path: Path, head: bytes) -> BinaryIO:
    """Open the file, decompressed. The first bytes decide on the method, not the name."""
    if head[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.open(path, "rb"))
    file = open(path, "rb")  # noqa: SIM115 - closed by the caller
    if head == b"\x28\xb5\x2f\xfd":
        return cast(BinaryIO, io.BufferedReader(_ZstdReader(file), _CHUNK))
    return cast(BinaryIO, file)


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of all frames. Unlike zstandard's own reader it raises on an incomplete frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame: Any = None
        self._compressed = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(1 << 14)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._compressed)
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _text_rows(path: Path, stream: BinaryIO) -> Iterator[RawRow]:
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(cast(Any, stream), _CHUNK)
    first = b""
    while not first.strip():
        line = buffered.readline(_CHUNK)
        if not line:
            break
        first += line
    bare = first.removeprefix(_BOM).lstrip()
    _reject_binary(path, first)
    if _is_array(path, bare, buffered):
        yield from _array_rows(first, buffered)
    else:
        yield from _line_rows(first, buffered)


def _is_array(path: Path, first: bytes, stream: Any) -> bool:
    """Return True if a text is a JSON array; `first` is its first line, or the beginning of it.

    A file named like JSON lines may still hold an array, unless its first line is a complete array,
    or plain text.
    """
    if not first.startswith(b"["):
        return False
    if not {suffix.lower() for suffix in path.suffixes} & {".jsonl", ".ndjson"}:
        return True
    if isinstance(_parse(first), Rejection):  # "[1, 2]" is rejected too: it is not an object
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return first[1:].lstrip()[:1] in (b"", b"{")
    return not stream.peek(1).strip()


def _reject_binary(path: Path, first: bytes) -> None:
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"data.files: {str(path)!r} is UTF-16; allowed: UTF-8")
    if b"\0" in first[:4096] or first[:4] in _BINARY_HEADS:
        raise UserError(
            f"data.files: {str(path)!r} is binary; allowed: JSONL, JSON array, gzip or zstd of these, Parquet"
        )


def _line_rows(first: bytes, stream: Any) -> Iterator[RawRow]:
    """Yield the rows of JSON lines; `first`, already read, holds blank lines and the first row."""
    number = 0
    pending = first.split(b"\n")
    unfinished = pending.pop()
    for line in pending:
        number += 1
        yield RawRow(number, _parse(line))
    while True:
        line = unfinished + stream.readline(MAX_ROW_BYTES)
        unfinished = b""
        if not line:
            return
        number += 1
        if line.endswith(b"\n"):
            yield RawRow(number, _parse(line))
        elif len(line) >= MAX_ROW_BYTES:
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
            yield RawRow(number, Rejection("row too large", f"over {MAX_ROW_BYTES >> 20} MiB"))
        else:
            yield RawRow(number, _parse(line))


def _parse(line: bytes) -> Any:
    """Return the value of one JSON text, a Rejection, or None for a blank text."""
    text = line.removeprefix(_BOM).strip()
    if not text:
        return None
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejection("invalid UTF-8", f"byte {error.start} of the row")
    except (ValueError, RecursionError) as error:
        return Rejection("invalid JSON", str(error))
    if not isinstance(value, dict):
        return Rejection("not a JSON object", f"{type(value).__name__}: {text[:60]!r}")
    return value


def _array_rows(first: bytes, stream: Any) -> Iterator[RawRow]:
    """Yield the elements of a JSON array.

    They are found by brackets and strings alone, so that an invalid element rejects only itself.
    """
    # Of the next element: its position in the buffer, and the line on which it starts.
    start = first.index(b"[") + 1
    line = 1 + first[:start].count(b"\n")
    buffer, scan, depth, ended = first, start, 0, False
    while not ended:
        match = _TOKEN.search(buffer, scan)
        if match is None or match.group() == b'"':  # end of the buffer, perhaps inside a string
            chunk = stream.read(max(_CHUNK, len(buffer) - start))
            if not chunk or len(buffer) - start > 4 * MAX_ROW_BYTES:
                break
            scan = (match.start() if match else max(scan, len(buffer))) - start
            buffer, start = buffer[start:] + chunk, 0
            continue
        token, scan = match.group(), match.end()
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]") and depth:
            depth -= 1
        elif depth == 0 and token in (b",", b"]"):
            element = buffer[start : match.start()]
            row_line = line + element[: len(element) - len(element.lstrip())].count(b"\n")
            if element.strip() or token == b",":
                value = _parse(element)
                yield RawRow(row_line, Rejection("invalid JSON", "empty element") if value is None else value)
            line += element.count(b"\n")
            start, ended = scan, token == b"]"
    rest = buffer[start:] + (stream.read(_CHUNK) if ended else b"")
    if rest.strip():
        blank = len(rest) - len(rest.lstrip())
        reason = "text after the end of the JSON array" if ended else "JSON array is incomplete"
        yield RawRow(line + rest[:blank].count(b"\n"), Rejection(reason, repr(rest[blank : blank + 60])))
    elif not ended:
        yield RawRow(line, Rejection("JSON array is incomplete", "no closing bracket"))


def _parquet_rows(path: Path, batch_rows: int = 256) -> Iterator[RawRow]:
    try:
        # With a buffer size, pages are read as they are needed instead of whole column chunks.
        file = pq.ParquetFile(path, buffer_size=_CHUNK)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data.files: {str(path)!r} is not a readable Parquet file: {error}") from error
    number = 0
    with file:
        try:
            nested = [f.name for f in file.schema_arrow if _struct_depth(f.type) > 1]
            for batch in file.iter_batches(batch_size=batch_rows):
                for value in _batch_values(batch):
                    for name in nested if isinstance(value, dict) else ():
                        value[name] = _without_added_nulls(value[name])
                    number += 1
                    yield RawRow(number, value)
        except (pa.ArrowException, OSError) as error:
            message = f"data.files: {str(path)!r}: Parquet page after row {number} is damaged: {error}"
            raise UserError(message) from error


def _struct_depth(kind: pa.DataType) -> int:
    """Return the nesting depth of structs: 1 for list<struct<role, content>>."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return max(map(_struct_depth, inner), default=0) + pa.types.is_struct(kind)


def _without_added_nulls(value: Any, depth: int = 0) -> Any:
    """Return the value without null fields of nested structs: Arrow gives every row the fields of all rows.

    Where another tool call has a day, the arguments {"city": "x"} of this one are read as {"city":
    "x", "day": null}.
    """
    if isinstance(value, list):
        return [_without_added_nulls(item, depth) for item in value]
    if isinstance(value, dict):
        items = ((k, _without_added_nulls(v, depth + 1)) for k, v in value.items())
        return {k: v for k, v in items if depth == 0 or v is not None}
    return value


def _batch_values(batch: pa.RecordBatch) -> list[Any]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        values: list[Any] = []
        for row in range(batch.num_rows):
            try:
                values.append(batch.slice(row, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                values.append(Rejection("invalid UTF-8", str(error)))
        return values
