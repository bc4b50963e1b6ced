"""A plan is read as it was written, and a damaged file is rejected."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.batching import storage
from dflash_core.batching.metrics import plan_report
from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import load_plan, save_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError

LENGTHS = np.array([3, 9, 4, 4, 7, 2, 10, 1, 6, 5], np.int32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_round_trip(tmp_path, strategy):
    config = BatchingConfig(strategy=strategy, token_budget=12, tokens_per_step=20, edges=(0, 4, 10))
    plan = build_plan(LENGTHS, config, seed=3, epoch=2, draft_slots=LENGTHS * 4)
    save_plan(plan, tmp_path / "epoch-002.parquet")
    loaded = load_plan(tmp_path / "epoch-002.parquet")
    assert loaded.digest == plan.digest
    assert loaded.config == config
    assert (loaded.seed, loaded.epoch) == (3, 2)
    indices = ("order", "offsets", "step_offsets", "widths")
    for name in (*indices, "tokens", "squared_lengths", "draft_slots", "draft_pairs"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(plan, name))
        assert getattr(loaded, name).dtype == getattr(plan, name).dtype
    assert plan_report(loaded) == plan_report(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-002.parquet"]


def test_rows_are_samples_in_execution_order(tmp_path):
    config = BatchingConfig(strategy="sorted", token_budget=12, tokens_per_step=20)
    plan = build_plan(LENGTHS, config, seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    table = pq.read_table(tmp_path / "plan.parquet")
    assert table["sample"].to_numpy().tolist() == plan.order.tolist()
    assert table["microbatch"].to_numpy()[0] == 0
    assert table["microbatch"].to_numpy()[-1] == plan.num_microbatches - 1
    assert table["step"].to_numpy()[-1] == plan.num_steps - 1


def test_many_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_ROWS_PER_GROUP", 7)
    lengths = np.arange(100, dtype=np.int32) % 13 + 1
    plan = build_plan(lengths, BatchingConfig(token_budget=40, tokens_per_step=90), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    assert pq.ParquetFile(tmp_path / "plan.parquet").num_row_groups > 5
    assert load_plan(tmp_path / "plan.parquet").digest == plan.digest


def test_empty_plan(tmp_path):
    plan = build_plan(np.empty(0, np.int32), BatchingConfig(), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    loaded = load_plan(tmp_path / "plan.parquet")
    assert loaded.num_steps == 0
    assert loaded.digest == plan.digest


def test_damaged_or_foreign_file_is_rejected(tmp_path):
    plan = build_plan(LENGTHS, BatchingConfig(token_budget=12, tokens_per_step=20), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    table = pq.read_table(tmp_path / "plan.parquet")
    swapped = table["sample"].to_numpy().copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    pq.write_table(table.set_column(0, table.schema.field(0), [swapped]), tmp_path / "changed.parquet")
    with pytest.raises(UserError, match=r"changed\.parquet.*digest"):
        load_plan(tmp_path / "changed.parquet")
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "foreign.parquet")
    with pytest.raises(UserError, match="not a batch plan"):
        load_plan(tmp_path / "foreign.parquet")


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("sample", lambda v: v - 5, "sample -5 below 0"),
        ("width", lambda v: v - 1000, "width .* below 0"),
        ("tokens", lambda v: -v, "tokens .* below 0"),
        ("microbatch", lambda v: v[::-1].copy(), "column microbatch does not count from 0 in steps of 1"),
        ("microbatch", lambda v: v * 2, "column microbatch does not count from 0 in steps of 1"),
        ("step", lambda v: v + 1, "column step does not count from 0 in steps of 1"),
        ("width", lambda v: v.astype(np.float64), "columns .*width: double"),
    ],
)
def test_numbers_that_lead_outside_are_rejected(tmp_path, column, change, words):
    plan = build_plan(LENGTHS, BatchingConfig(token_budget=12, tokens_per_step=20), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    table = pq.read_table(tmp_path / "plan.parquet")
    i = table.schema.get_field_index(column)
    changed = table.set_column(i, column, pa.array(change(table[column].to_numpy())))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), tmp_path / "changed.parquet")
    with pytest.raises(UserError, match=rf"changed\.parquet: damaged: ValueError: {words}"):
        load_plan(tmp_path / "changed.parquet")


@pytest.mark.parametrize("origin", [b"{", b"{}", b"3", b'{"config": 3}', b"[" * 100_000])
def test_settings_that_cannot_be_read_are_rejected(tmp_path, origin):
    plan = build_plan(LENGTHS, BatchingConfig(token_budget=12, tokens_per_step=20), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    table = pq.read_table(tmp_path / "plan.parquet").replace_schema_metadata({"batch_plan": origin})
    pq.write_table(table, tmp_path / "plan.parquet")
    with pytest.raises(UserError, match="damaged: "):
        load_plan(tmp_path / "plan.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_rejected(tmp_path, content):
    (tmp_path / "plan.parquet").write_bytes(content)
    with pytest.raises(UserError, match="damaged: "):
        load_plan(tmp_path / "plan.parquet")
