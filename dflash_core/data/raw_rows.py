"""One row of a file before its columns are read, its place in the file, and the limits of reading.

Limits of memory: one row of text takes at most `MAX_ROW_BYTES`, whatever its container; what is longer is
skipped in pieces of `CHUNK_BYTES` and rejected. More than `MAX_BLANK_BYTES` of blanks in a row fail the file.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from dflash_core.data.chat import Rejection

MAX_ROW_BYTES = 64 << 20
MAX_BLANK_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


class RawRow(NamedTuple):
    """One row: where it is, and its value: a mapping, a Rejection, or None for a blank line.

    `line` is the physical line on which it starts, None in Parquet. `element` is its number in a JSON array
    or in Parquet, None in JSON lines. Both count from 1.
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


def parse(text: bytes) -> Any:
    """Return the object that a JSON text holds, a Rejection, or None for a blank text."""
    text = text.removeprefix(BOM).strip()
    if not text:
        return None
    try:
        value = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejection("invalid UTF-8", f"byte {error.start} of the row")
    except (ValueError, RecursionError) as error:
        return Rejection("invalid JSON", str(error))
    if not isinstance(value, dict):
        return Rejection(NOT_AN_OBJECT, f"{type(value).__name__}: {text[:60]!r}")
    return value


# Reason of a row that is valid JSON but not an object.
NOT_AN_OBJECT = "not a JSON object"


def too_large() -> Rejection:
    """Return the rejection of a row above the limit."""
    return Rejection("row too large", f"over {MAX_ROW_BYTES >> 20} MiB")
