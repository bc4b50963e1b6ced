"""The length profile in SQL, on figures a person can check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data.shard_writer import SAMPLES_SCHEMA
from tasks import length_profile

BOUND = 1000


def write(path: Path, source: str, lengths: list[int], validation: frozenset[int] = frozenset()) -> str:
    """Write samples.parquet: every second token is supervised, one anchor fewer is eligible."""
    rows = [
        {
            "sample_id": number.to_bytes(16, "little"),
            "source": source,
            "sequence_length": length,
            "num_supervised_tokens": length // 2,
            "num_eligible_anchors": length // 2 - 1,
            # Of one shard; the bound of the store decides.
            "is_validation": False,
            "validation_key": 5 if number in validation else BOUND,
        }
        for number, length in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES_SCHEMA), path)
    return str(path)


def relations(samples: list[str], candidates: list[int]) -> dict[str, list[dict[str, Any]]]:
    with length_profile.connect() as connection:
        length_profile.count_lengths(connection, samples, BOUND)
        names = ("length_stats", "length_histogram", "source_stats")
        found = {name: length_profile.query(connection, name) for name in names}
        parameters = {"max_lengths": candidates}
        return found | {"truncation_loss": length_profile.query(connection, "truncation_loss", parameters)}


def test_figures_of_two_sources(tmp_path: Path) -> None:
    ten = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    samples = [write(tmp_path / "a", "a", ten, frozenset({0})), write(tmp_path / "b", "b", [20, 400])]
    found = relations(samples, [50, 100])
    [stats] = found["length_stats"]
    assert stats == {
        "num_samples": 12,
        "num_validation_samples": 1,
        "num_tokens": 970,
        "num_supervised_tokens": 485,
        "num_eligible_anchors": 473,
        "min_length": 10,
        "mean_length": pytest.approx(970 / 12),
        # The sixth of twelve.
        "median_length": 50,
        "p90_length": 100,
        "p99_length": 400,
        "max_length": 400,
    }
    histogram = {row["sequence_length"]: row["num_samples"] for row in found["length_histogram"]}
    assert histogram == {20: 2} | dict.fromkeys([30, 40, 50, 60, 70, 80, 90, 100, 400], 1)
    a, b = found["source_stats"]
    expected = {"source": "a", "num_samples": 10, "median_length": 50, "p90_length": 90, "p99_length": 100}
    assert {name: a[name] for name in expected} == expected
    assert (b["source"], b["num_tokens"], b["mean_length"], b["max_length"]) == ("b", 420, 210.0, 400)
    over_50, over_100 = found["truncation_loss"]
    assert over_100 == {
        "max_length": 100,
        "num_samples_over": 1,
        "tokens_lost_by_cutting": 300,
        "tokens_lost_by_rejecting": 400,
        "num_tokens": 970,
    }
    assert (over_50["num_samples_over"], over_50["tokens_lost_by_cutting"]) == (6, 150 + 350)


def test_quantiles_are_those_of_sorted_lengths(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 777).tolist()
    [stats] = relations([write(tmp_path / "a", "a", lengths)], [30])["length_stats"]
    ordered = sorted(lengths)
    for name, share in (("median_length", 0.5), ("p90_length", 0.9), ("p99_length", 0.99)):
        assert stats[name] == ordered[int(np.ceil(share * 777)) - 1]


def test_no_samples_at_all(tmp_path: Path) -> None:
    [stats] = relations([write(tmp_path / "a", "a", [])], [30])["length_stats"]
    assert (stats["num_samples"], stats["num_tokens"], stats["max_length"]) == (0, 0, None)


@pytest.mark.parametrize("name", ["sequence_length=8", "source=chat", "validation_key=3", "r[1]", "r?", "r*"])
def test_paths_decide_neither_columns_nor_files(tmp_path: Path, name: str) -> None:
    """DuckDB takes name=value for a column of that name, and [1] for a pattern."""
    for directory in (name, "r1"):
        (tmp_path / directory / "runs").mkdir(parents=True)
        sample = write(tmp_path / directory / "runs" / "samples.parquet", directory, [10, 20])
        if directory == name:
            samples = [sample]
    found = relations(samples, [15])
    assert [row["sequence_length"] for row in found["length_histogram"]] == [10, 20]
    assert [row["source"] for row in found["source_stats"]] == [name]
    assert length_profile.length_digest([Path(sample) for sample in samples], BOUND)
    assert length_profile.validation_bound([Path(sample) for sample in samples], DataConfig()) > 0


def test_the_digest_of_lengths_does_not_depend_on_the_path(tmp_path: Path) -> None:
    digests = set()
    for directory in ("plain", "sequence_length=8", "source=chat", "num_supervised_tokens=1"):
        (tmp_path / directory).mkdir()
        sample = write(tmp_path / directory / "samples.parquet", "a", [10, 20])
        digests.add(length_profile.length_digest([Path(sample)], BOUND))
    assert len(digests) == 1
