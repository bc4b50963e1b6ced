"""Steps, microbatches and validation samples, from plans and a token store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import save_plan
from dflash_core.config import BatchingConfig
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.schedule import Schedule, build_microbatch, validation_groups, validation_rows
from dflash_core.errors import UserError


def test_steps_are_counted_over_epochs(schedule: Schedule) -> None:
    first = schedule.plan(0).num_steps
    assert schedule.locate(0) == (0, 0)
    assert schedule.locate(first - 1) == (0, first - 1)
    assert schedule.locate(first) == (1, 0)
    assert schedule.total_steps == sum(schedule.plan(e).num_steps for e in range(3))


def test_step_summaries_add_up_to_the_epoch(store: TokenStore, schedule: Schedule) -> None:
    summaries = [schedule.step_summary(s) for s in range(schedule.first_step[1])]
    rows = store.train_indices
    assert sum(s["batch/num_samples"] for s in summaries) == len(rows)
    assert sum(s["batch/tokens"] for s in summaries) == store.lengths[rows].sum()
    assert sum(s["batch/supervised_tokens"] for s in summaries) == store.num_supervised[rows].sum()
    for s in summaries:
        assert 0 < s["batch/padding_efficiency"] <= 1
        assert 0.5 <= s["batch/largest_source_share"] <= 1  # two sources


def test_a_plan_of_other_shards_is_rejected(store: TokenStore, tmp_path: Path) -> None:
    plan = build_plan(np.full(500, 10, np.int32), BatchingConfig(token_budget=100), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    with pytest.raises(UserError, match="plan of 500 or more samples, the shards hold"):
        Schedule(store, [tmp_path / "plan.parquet"], None)
    lengths = store.lengths[store.train_indices]
    plan = build_plan(lengths[::-1], BatchingConfig(strategy="random", token_budget=100), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    with pytest.raises(
        UserError, match="microbatch 0 has .* tokens in rows of .*, the samples have .* tokens"
    ):
        Schedule(store, [tmp_path / "plan.parquet"], None)
    with pytest.raises(UserError, match="no such plan"):
        Schedule(store, [tmp_path / "absent.parquet"], None)


def test_a_microbatch_holds_the_samples_and_their_own_anchors(store: TokenStore) -> None:
    rows = store.train_indices[[5, 2, 7]]
    together = build_microbatch(store, rows, 0, num_anchors=6, seed=3, epoch=1)
    assert together.cu_seqlens.tolist() == [0, *np.cumsum(store.lengths[rows])]
    for i, row in enumerate(rows):
        alone = build_microbatch(store, np.array([row]), 0, num_anchors=6, seed=3, epoch=1)
        first, end = together.cu_seqlens[i : i + 2]
        assert together.token_ids[first:end].tolist() == store.token_ids(int(row)).tolist()
        anchors = together.anchors[together.anchor_sample == i] - first
        assert anchors.tolist() == alone.anchors.tolist()
    assert (np.diff(together.anchors) > 0).all()
    other_epoch = build_microbatch(store, rows, 0, num_anchors=6, seed=3, epoch=2)
    assert other_epoch.anchors.tolist() != together.anchors.tolist()


def test_a_sample_without_anchors_is_still_in_its_microbatch(store: TokenStore) -> None:
    row = store.train_indices[store.num_eligible[store.train_indices] == 0][:1]
    microbatch = build_microbatch(store, row, 0, num_anchors=6, seed=0, epoch=0)
    assert len(microbatch.anchors) == 0
    assert microbatch.num_tokens == store.lengths[row[0]]


def test_validation_samples_go_by_content_digest_and_fit_the_budget(store: TokenStore) -> None:
    rows = validation_rows(store, 3)
    ids = [store.sample_id(int(r)) for r in store.validation_indices]
    assert [store.sample_id(int(r)) for r in rows] == sorted(ids)[:3]
    every = validation_rows(store, 1000)
    assert sorted(every) == sorted(store.validation_indices)
    for packed in (True, False):
        groups = validation_groups(store, every, token_budget=100, packed=packed)
        assert np.concatenate([g for g, _ in groups]).tolist() == every.tolist()
        for members, width in groups:
            slots = store.lengths[members].sum() if packed else width * len(members)
            assert slots <= 100
            assert (width == 0) == packed
