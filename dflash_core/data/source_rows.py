"""Rows of a file or of the standard library, with their format; the first rows decide it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from dflash_core.config import DATA_COLUMNS, DataConfig
from dflash_core.data import stdlib_corpus
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import limited, read_rows
from dflash_core.data.format_detection import ACCEPTED, detect_format
from dflash_core.data.formats import MEDIA_COLUMNS, REASONING_FIELDS, RESPONSE_COLUMNS, TURN_COLUMNS
from dflash_core.data.raw_rows import RawRow
from dflash_core.errors import UserError

_DETECTION_ROWS = 100

# Columns that formats and their detection read; the others of a Parquet file stay on the disk.
READ_COLUMNS = {*DATA_COLUMNS, *TURN_COLUMNS, *RESPONSE_COLUMNS, *REASONING_FIELDS, *MEDIA_COLUMNS}
READ_COLUMNS |= {"rejection", "chosen", "rejected", "tokens"}


def open_rows(
    path: Path | str, config: DataConfig, *, answered: bool = True, digest: str | None = None
) -> tuple[str, Iterator[RawRow]]:
    """Return format and rows of a file or of "stdlib": at most `data.limit` rows, blank lines not counted.

    Args:
        path: a file, or "stdlib".
        config: `format`, `columns`, `roles` and `limit` are read.
        answered: reject a file of prompts without answers. Otherwise all columns are read.
        digest: sha256 of the file's bytes, checked behind the last row; None: not checked.

    Raises:
        UserError: the file is not a data set of a known format.
    """
    if str(path) == stdlib_corpus.SOURCE:
        return "messages", limited(_stdlib_rows(), config.limit)
    columns = {*READ_COLUMNS, *config.columns.values()} if answered else None
    rows = read_rows(Path(path), digest=digest, limit=config.limit, columns=columns)
    first: list[RawRow] = []
    num_blank = 0
    for row in rows:
        first.append(row)
        num_blank += row.value is None
        if len(first) - num_blank == _DETECTION_ROWS:
            break
    objects = [row.value for row in first if isinstance(row.value, dict)]
    if not objects:
        reason = _no_objects_reason(first)
        raise UserError(f"data.files: {str(path)!r} has no rows that are objects with columns{reason}")
    format_name = detect_format(objects, config, source=str(path), answered=answered)
    return format_name, itertools.chain(first, rows)


def _no_objects_reason(rows: list[RawRow]) -> str:
    """Return the end of an error message: the first rejection, and the rows that are allowed."""
    rejected = next((row for row in rows if isinstance(row.value, Rejection)), None)
    reason = ""
    if rejected is not None:
        reason = f"; {rejected.place}: {rejected.value.reason} ({rejected.value.detail})"
    allowed = "one JSON object per line, a JSON array of objects, Parquet"
    return f"{reason}; allowed: {allowed}; columns: {ACCEPTED}"


def _stdlib_rows() -> Iterator[RawRow]:
    for number, row in enumerate(stdlib_corpus.corpus_rows(), start=1):
        yield RawRow(number, row)
