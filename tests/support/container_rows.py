"""Rows of a file with given bytes, and the reasons of its rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def rows_of(path: Path, content: bytes) -> list[tuple[Any, Any]]:
    return [(row.line, row.value) for row in read_rows(write(path, content))]


def reasons_of(rows: list[tuple[Any, Any]]) -> list[tuple[Any, str]]:
    return [(line, value.reason) for line, value in rows if isinstance(value, Rejection)]
