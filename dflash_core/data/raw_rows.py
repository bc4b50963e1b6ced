"""One row of a file before its columns are read, its place in the file, and the limits of reading.

Limits of memory: one row of text takes at most `MAX_ROW_BYTES`, whatever its container; what is longer is
skipped in pieces of `CHUNK_BYTES` and rejected. More than `MAX_BLANK_BYTES` of blanks in a row fail the file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NamedTuple

from dflash_core.data.chat import Rejection

MAX_ROW_BYTES = 64 << 20
MAX_BLANK_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
_BLANKS = re.compile(r"[ \t\r\n]*+")


class RawRow(NamedTuple):
    """One row: where it is, and its value: a mapping, a Rejection, or None for a blank line.

    `line` is the physical line on which it starts, None in Parquet and for blank lines. `element` is its
    number in a JSON array or in Parquet, None in JSON lines. Both count from 1.
    """

    line: int | None
    value: Any
    element: int | None = None

    @property
    def place(self) -> str:
        """Return the place as text, see `place_text`."""
        return place_text(self.line, self.element)


def place_text(line: int | None, element: int | None) -> str:
    """Return a row's place as text: "line 3", "line 1, element 501" in an array, "row 7" in Parquet."""
    if line is None:
        return f"row {element}"
    return f"line {line}" if element is None else f"line {line}, element {element}"


# All blank lines: thousands of them may be read before the first row.
BLANK = RawRow(None, None)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; one value of a name that occurs twice would be lost in silence."""
    value = dict(pairs)
    if len(value) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name[:40]!r} occurs twice in one object")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_names)


def parse(text: bytes) -> Any:
    """Return the object that a JSON text holds, a Rejection, or None for a blank text."""
    text = text.removeprefix(BOM).strip()
    if not text:
        return None
    try:
        value = _DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejection("invalid UTF-8", f"byte {error.start} of the row")
    except (ValueError, RecursionError) as error:
        return Rejection("invalid JSON", str(error))
    if not isinstance(value, dict):
        return Rejection(NOT_AN_OBJECT, f"{type(value).__name__}: {text[:60]!r}")
    return value


def parse_line(line: bytes) -> list[Any]:
    """Return the value of a line as `parse` does, or all of its objects if it holds several.

    Where a line break is missing, `{"a": 1}{"a": 2}` are two rows. A line that holds anything else behind an
    object is one rejected row.
    """
    value = parse(line)
    if isinstance(value, Rejection) and value.detail.startswith("Extra data"):
        return _objects(line.removeprefix(BOM).decode()) or [value]
    return [value]


def _objects(text: str) -> list[Any]:
    """Return the objects of which a text consists; none if it holds anything else."""
    objects: list[Any] = []
    end = _BLANKS.match(text).end()  # type: ignore[union-attr]
    while end < len(text):
        try:
            value, end = _DECODER.raw_decode(text, end)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict):
            return []
        objects.append(value)
        end = _BLANKS.match(text, end).end()  # type: ignore[union-attr]
    return objects


# Reason of a row that is valid JSON but not an object.
NOT_AN_OBJECT = "not a JSON object"


def too_large() -> Rejection:
    """Return the rejection of a row above the limit."""
    return Rejection("row too large", f"over {MAX_ROW_BYTES >> 20} MiB")
