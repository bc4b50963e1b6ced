"""Files of rows in every container, and their shards."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.config import DataConfig
from dflash_core.data.ingest import ingest_file
from tests.support.chat_families import MASK_TOKEN_ID, small_tokenizer

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


def ingest(path: Path, content: bytes | None = None, **settings: Any) -> tuple[dict[str, Any], Path]:
    """Return manifest and shard of a file, written first if `content` is given."""
    if content is not None:
        path.write_bytes(content)
    out = path.parent / f"{path.name}.shard"
    config = DataConfig(**{"max_reject_share": 1.0, **settings})
    return ingest_file(path, config, small_tokenizer(), out, mask_token_id=MASK_TOKEN_ID), out


def rejects_of(shard: Path, place: str = "line") -> list[tuple[int, str]]:
    """Return place and reason of each reject of a shard."""
    return [(r[place], r["reason"]) for r in pq.read_table(shard / "rejects.parquet").to_pylist()]
