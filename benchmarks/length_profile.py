"""The length profile of large data sets in DuckDB, from the lengths that ingest stores.

    python -m benchmarks.length_profile                  # 902,000 and 10 million samples, 8 shards each
    python -m benchmarks.length_profile --samples 902000 --shards 500

Writes samples.parquet files as ingest does, with log-normal lengths (mean near 1,600 tokens, at most 8,192),
and times the stage: "profile" is its body (statistics, histogram, sources, truncation table, written as
JSON); "key" is the part that decides whether the body runs (the bound of the validation split and the digest
of all lengths). Both include opening DuckDB; files are in the page cache. The profile is compared with NumPy.
Prints a table, then one line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.config import DataConfig
from dflash_core.data.shard_writer import SAMPLES_SCHEMA
from tasks import length_profile

# the row group of ShardWriter
ROW_GROUP = 1 << 15


def write_samples(directory: Path, num_samples: int, num_shards: int) -> np.ndarray:
    """Write samples.parquet of each shard; return all lengths."""
    generator = np.random.default_rng(0)
    parts = []
    for number, count in enumerate(np.diff(np.linspace(0, num_samples, num_shards + 1).astype(int))):
        lengths = np.clip(generator.lognormal(7.2, 0.55, count), 64, 8192).astype(np.int32)
        parts.append(lengths)
        keys = generator.integers(0, 1 << 64, count, dtype=np.uint64)
        ids = [None, pa.py_buffer(generator.bytes(16 * count))]
        columns = [
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, ids),
            pa.array([f"file-{number}"] * count),
            pa.array(lengths),
            pa.array(lengths // 2),
            pa.array(lengths // 2 - 1),
            pa.array(keys < (1 << 64) // 100),
            pa.array(keys),
        ]
        shard = directory / f"shard-{number}"
        shard.mkdir()
        table = pa.Table.from_arrays(columns, schema=SAMPLES_SCHEMA)
        pq.write_table(table, shard / "samples.parquet", compression="zstd", row_group_size=ROW_GROUP)
    return np.concatenate(parts)


def measure(num_samples: int, num_shards: int, rounds: int) -> dict[str, Any]:
    """Time key and profile of generated shards, and check the profile."""
    seconds: dict[str, list[float]] = {"key": [], "profile": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        lengths = write_samples(directory, num_samples, num_shards)
        shards = [directory / f"shard-{number}" for number in range(num_shards)]
        samples = [shard / "samples.parquet" for shard in shards]
        for _ in range(rounds + 1):
            started = time.perf_counter()
            bound = length_profile.validation_bound(samples, DataConfig())
            digest = length_profile.length_digest(samples, bound)
            seconds["key"].append(time.perf_counter() - started)
            started = time.perf_counter()
            length_profile.profile_lengths.write(
                directory,
                length_digest=digest,
                sql_digest=length_profile.sql_digest(),
                validation_bound=bound,
                shards=[str(shard) for shard in shards],
            )
            seconds["profile"].append(time.perf_counter() - started)
        profile = length_profile.read_profile(directory)
    assert profile["stats"]["num_samples"] == num_samples
    assert profile["stats"]["num_tokens"] == lengths.sum()
    assert profile["stats"]["median_length"] == np.sort(lengths)[(num_samples - 1) // 2]
    assert sum(profile["counts"]) == num_samples - profile["stats"]["num_validation_samples"]
    figures: dict[str, Any] = {"samples": num_samples, "shards": num_shards}
    for part, times in seconds.items():
        # the first round fills the page cache
        times = times[1:]
        figures[f"{part}_seconds"] = statistics.median(times)
        figures[f"{part}_seconds_max"] = max(times)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="*", default=[902_000, 10_000_000])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results = [measure(count, args.shards, args.rounds) for count in args.samples]
    for row in results:
        profile, key = (
            f"{part} {row[f'{part}_seconds']:.3f} s (at most {row[f'{part}_seconds_max']:.3f})"
            for part in ("profile", "key")
        )
        print(f"{row['samples']:>12,} samples in {row['shards']} shards: {profile}, {key}")
    print(json.dumps({"profiles": results}))


if __name__ == "__main__":
    main()
