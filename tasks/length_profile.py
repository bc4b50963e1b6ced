"""Stage `profile`: how long the samples are, by DuckDB over the shards' samples.parquet. The SQL is in
`sql/`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sql
from dflash_core.config import DataConfig
from dflash_core.files import content_digest
from tasks.storage.stages import stage

RELATIONS = ("length_counts", "length_stats", "length_histogram", "source_stats", "truncation_loss")
MAX_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)  # candidates of the truncation table


def connect() -> Any:
    """DuckDB in memory, with bounded memory and threads, spilling to the system's temporary directory, and
    offline.
    """
    import duckdb

    return duckdb.connect(
        config={
            "threads": min(8, os.cpu_count() or 1),
            "memory_limit": "2GB",
            "temp_directory": tempfile.gettempdir(),
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
    )


def query(connection: Any, name: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The rows of `sql/<name>.sql` as mappings."""
    cursor = connection.cursor()
    result = cursor.execute(sql.read(name), parameters)
    columns = [column[0] for column in result.description]
    return [dict(zip(columns, row)) for row in result.fetchall()]


def count_lengths(connection: Any, samples: Sequence[str], validation_bound: int) -> None:
    """Makes the table `length_counts`, which the other relations read: the only scan of the samples."""
    parameters = {"shards": list(samples), "validation_bound": validation_bound}
    connection.execute(f"CREATE TABLE length_counts AS {sql.read('length_counts')}", parameters)


def validation_bound(samples: Sequence[Path], data: DataConfig) -> int:
    """The key below which a sample is a validation sample, over all shards."""
    import numpy as np
    import pyarrow.parquet as pq

    from dflash_core.data.store import validation_threshold

    keys = [pq.read_table(path, columns=["validation_key"])["validation_key"].to_numpy() for path in samples]
    return validation_threshold(
        np.concatenate(keys), share=data.validation_share, minimum=data.min_validation_samples
    )


def length_digest(samples: Sequence[Path], bound: int) -> str:
    """Digest of all that the profile shows, whatever the order of rows: the profile's key. Needs no token."""
    import duckdb

    with connect() as connection:
        rows = query(connection, "length_digest", {"shards": _texts(samples), "validation_bound": bound})
        return content_digest(
            {"duckdb": duckdb.__version__, "rows": rows}
        )  # hash() may change with DuckDB's version


def sql_digest() -> str:
    """Digest of the texts of the profile's relations."""
    return content_digest({name: sql.read(name) for name in RELATIONS})


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]


@stage("profile", version=1, key_only=("length_digest", "sql_digest"), locations=("shards",))
def profile_lengths(out: Path, *, validation_bound: int, shards: list[str]) -> dict[str, Any]:
    """Writes profile.json: the statistics, the histogram of training samples, sources, what truncation would
    lose.
    """
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
    return {
        "stats": stats,
        "histogram_digest": content_digest({"lengths": profile["lengths"], "counts": profile["counts"]}),
    }


def read_profile(directory: Path) -> dict[str, Any]:
    """The profile in a stage's directory."""
    return json.loads((directory / "profile.json").read_text(encoding="utf-8"))
