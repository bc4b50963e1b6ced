"""Files of rows in every container."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def chat(question: str, answer: str | None) -> Row:
    """Return a row of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def lines(rows: list[Row]) -> bytes:
    """Return rows as JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_rows(path: Path, rows: list[Row]) -> tuple[Path, str]:
    """Write rows in the container of the file's name; return the path and the sha256 of its bytes."""
    if path.name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50, compression="none")
    elif path.name.endswith("gz"):
        path.write_bytes(gzip.compress(lines(rows), 1))
    else:
        path.write_bytes(json.dumps(rows).encode() if path.name.endswith("json") else lines(rows))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
