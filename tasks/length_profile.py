"""Stage `profile`: sequence lengths of the samples, computed by DuckDB over the shards' samples.parquet.

The SQL is in `sql/`, one relation per file. Samples are scanned once, into a table of counts by length, which
the other relations read. The stage reruns when lengths or the SQL change; its key needs no token.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sql
from dflash_core.config import DataConfig
from dflash_core.files import content_digest
from tasks.storage.stages import stage

RELATIONS = ("length_counts", "length_stats", "length_histogram", "source_stats", "truncation_loss")
# Candidates for data.max_length in the truncation table.
MAX_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)


@contextlib.contextmanager
def connect() -> Iterator[Any]:
    """Open DuckDB in memory: offline, with bounded memory and threads, spilling to a private directory."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="dflash-") as directory:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": min(8, os.cpu_count() or 1),
            "memory_limit": "2GB",
            "temp_directory": directory,
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        with duckdb.connect(config=config) as connection:
            yield connection


def query(connection: Any, name: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the rows of `sql/<name>.sql` as mappings."""
    cursor = connection.cursor()
    result = cursor.execute(sql.read(name), parameters)
    columns = [column[0] for column in result.description]
    return [dict(zip(columns, row)) for row in result.fetchall()]


def _exact(samples: Sequence[Path | str]) -> list[str]:
    """Return paths such that DuckDB reads these files alone: it takes *, ? and [ in a path for a pattern."""
    return [glob.escape(str(path)) for path in samples]


def count_lengths(connection: Any, samples: Sequence[str], validation_bound: int) -> None:
    """Create the table `length_counts`, which the other relations read: the only scan of the samples."""
    parameters = {"shards": _exact(samples), "validation_bound": validation_bound}
    connection.execute(f"CREATE TABLE length_counts AS {sql.read('length_counts')}", parameters)


def validation_bound(samples: Sequence[Path], data: DataConfig) -> int:
    """Return the key below which a sample of any shard is a validation sample."""
    import numpy as np
    import pyarrow.parquet as pq

    from dflash_core.data.store import validation_threshold

    column = "validation_key"
    keys = [pq.ParquetFile(path).read(columns=[column])[column].to_numpy() for path in samples]
    return validation_threshold(
        np.concatenate(keys), share=data.validation_share, minimum=data.min_validation_samples
    )


def length_digest(samples: Sequence[Path], bound: int) -> str:
    """Return the digest of everything that the profile shows, independent of the order of rows."""
    import duckdb

    parameters = {"shards": _exact(samples), "validation_bound": bound}
    with connect() as connection:
        rows = query(connection, "length_digest", parameters)
    # The version is part of the digest, since hash() in SQL may change with it.
    return content_digest({"duckdb": duckdb.__version__, "rows": rows})


def sql_digest() -> str:
    """Return the digest of the profile's relations: their words, without comments and line breaks."""
    return content_digest({name: _words(sql.read(name)) for name in RELATIONS})


def _words(text: str) -> list[str]:
    return [word for line in text.splitlines() if not line.startswith("--") for word in line.split()]


@stage("profile", version=1, key_only=("length_digest", "sql_digest"), locations=("shards",))
def profile_lengths(out: Path, *, validation_bound: int, shards: list[str]) -> dict[str, Any]:
    """Write profile.json: statistics, the histogram of training samples, sources, the loss by truncation."""
    samples = [str(Path(shard) / "samples.parquet") for shard in shards]
    with connect() as connection:
        count_lengths(connection, samples, validation_bound)
        [stats] = query(connection, "length_stats")
        histogram = query(connection, "length_histogram")
        longest = stats["max_length"] or 0
        candidates = [n for n in MAX_LENGTHS if n < longest] or [longest]
        profile = {
            "stats": stats,
            "lengths": [row["sequence_length"] for row in histogram],
            "counts": [row["num_samples"] for row in histogram],
            "sources": query(connection, "source_stats"),
            "truncation": query(connection, "truncation_loss", {"max_lengths": candidates}),
        }
    (out / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    histogram_digest = content_digest({"lengths": profile["lengths"], "counts": profile["counts"]})
    return {"stats": stats, "histogram_digest": histogram_digest}


def read_profile(directory: Path) -> dict[str, Any]:
    """Return the profile in a stage's directory."""
    return json.loads((directory / "profile.json").read_text(encoding="utf-8"))
