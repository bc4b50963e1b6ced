"""The timeline of a run, with times that can be followed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.timeline import Rates, Timeline, simulate
from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import save_plan
from dflash_core.config import BatchingConfig, TrainingConfig
from dflash_core.data.shard_writer import ShardWriter
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.schedule import Schedule
from dflash_core.launch.layout import make_layout


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    """8 samples of 10 tokens, one per microbatch, 4 microbatches per step: 2 steps."""
    root: Path = tmp_path_factory.mktemp("simulate")
    with ShardWriter(root / "shard", source_digest="x", meta={}) as writer:
        for i in range(8):
            writer.add(np.full(10, i, np.int32), np.ones(10, np.uint8), source="s")
        writer.close()
    store = TokenStore.open([root / "shard"], validation_share=0)
    config = BatchingConfig(token_budget=10, tokens_per_step=40)
    save_plan(build_plan(store.lengths, config, seed=0, epoch=0), root / "plan.parquet")
    return Schedule(store, [root / "plan.parquet"], None)


def run(
    schedule: Schedule,
    config: TrainingConfig,
    *,
    capture: float,
    train: float,
    transfer: float = 0.0,
    **more: int,
) -> Timeline:
    rates = Rates(capture=lambda a: capture, train=lambda a: train, transfer=lambda a: transfer, step=0.0)
    inflight = more.get("max_inflight", 2)
    return simulate(make_layout(config), schedule, rates, steps=range(2), max_inflight=inflight)


def test_colocated_ranks_share_a_step(schedule: Schedule) -> None:
    assert run(schedule, TrainingConfig(), capture=2, train=1).step_ends == [12, 24]
    two = run(schedule, TrainingConfig(num_drafter_ranks=2), capture=2, train=1)
    assert two.step_ends == [6, 12]
    assert (two.target_busy, two.drafter_busy) == pytest.approx((2 / 3, 1 / 3))


def test_a_slow_target_sets_the_pace(schedule: Schedule) -> None:
    """Captures end at 2, 4, 6, 8, ...; the last of a step is trained one second later."""
    timeline = run(schedule, TrainingConfig(topology="split"), capture=2, train=1)
    assert timeline.step_ends == [9, 17]
    assert timeline.target_busy == pytest.approx(16 / 17)
    assert timeline.drafter_busy == pytest.approx(8 / 17)


def test_a_slow_drafter_sets_the_pace_and_the_target_runs_ahead_only_so_far(schedule: Schedule) -> None:
    timeline = run(schedule, TrainingConfig(topology="split"), capture=1, train=3)
    assert timeline.step_ends == [13, 25]  # 1 + 8 * 3
    tight = run(schedule, TrainingConfig(topology="split"), capture=1, train=3, max_inflight=1)
    assert tight.step_ends[-1] >= timeline.step_ends[-1]


def test_two_targets_halve_the_wait(schedule: Schedule) -> None:
    """Captures of two targets end at 2, 2, 4, 4, 6, 6, 8, 8: training is the bottleneck but for the start."""
    timeline = run(schedule, TrainingConfig(topology="split", num_target_ranks=2), capture=2, train=1)
    assert timeline.step_ends == [6, 10]


def test_a_slow_link_becomes_the_limit(schedule: Schedule) -> None:
    timeline = run(schedule, TrainingConfig(topology="split"), capture=1, train=1, transfer=5)
    assert timeline.step_ends == [
        22,
        42,
    ]  # first arrival at 6, then one every 5 seconds, and one second to train
