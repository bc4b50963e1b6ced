"""Who captures and trains on what: nothing lost, nothing twice, the same steps at any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import save_plan
from dflash_core.config import BatchingConfig, TrainingConfig
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.assignment import (
    Assignment,
    assignments_of_rank,
    assignments_of_step,
    validation_assignments,
)
from dflash_core.dataflow.prefetch import Prefetcher
from dflash_core.dataflow.schedule import Schedule, build_microbatch, validation_groups, validation_rows
from dflash_core.errors import UserError
from dflash_core.launch.layout import devices_of_rank, make_layout, ranks_per_node, role_of, split_advice
from tests.training_run import write_shard


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    shard = write_shard(tmp_path_factory.mktemp("data") / "shard")
    return TokenStore.open([shard], validation_share=0.1, min_validation_samples=4)


@pytest.fixture(scope="module")
def schedule(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Schedule:
    directory = tmp_path_factory.mktemp("plans")
    config = BatchingConfig(strategy="bucketed", token_budget=100, tokens_per_step=300, num_buckets=2)
    for epoch in range(3):
        save_plan(
            build_plan(store.lengths[store.train_indices], config, seed=0, epoch=epoch),
            directory / f"epoch-{epoch}.parquet",
        )
    return Schedule(store, sorted(directory.iterdir()), None)


def split(targets: int, drafters: int, nodes: int = 1) -> TrainingConfig:
    return TrainingConfig(
        topology="split", num_target_ranks=targets, num_drafter_ranks=drafters, num_nodes=nodes
    )


def test_roles() -> None:
    layout = make_layout(split(3, 1))
    assert (layout.drafters, layout.targets, layout.world_size) == ((0,), (1, 2, 3), 4)
    two_nodes = make_layout(split(4, 2, nodes=2))
    assert (two_nodes.drafters, two_nodes.targets) == ((0, 3), (1, 2, 4, 5))
    uneven = make_layout(split(3, 1, nodes=2))  # one island over both nodes
    assert uneven.islands == (((0,), (1, 2, 3)),)
    colocated = make_layout(TrainingConfig(num_drafter_ranks=2))
    assert colocated.drafters == colocated.targets == (0, 1)
    assert [role_of(layout, r) for r in (0, 1)] == ["drafter", "target"]
    assert role_of(colocated, 1) == "colocated"


def test_devices_of_a_node() -> None:
    def devices(config: TrainingConfig, *, spread: bool = True, num_devices: int = 8) -> list[list[int]]:
        ranks = range(ranks_per_node(config))
        return [list(devices_of_rank(config, r, num_devices, spread_target=spread)) for r in ranks]

    assert devices(split(3, 1), spread=False) == [[0], [1], [2], [3]]
    assert devices(split(1, 2)) == [[0], [1], [2, 3, 4, 5, 6, 7]]
    assert devices(split(2, 1)) == [[0], [1, 2, 3], [4, 5, 6]]
    assert devices(split(2, 2, nodes=2)) == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert devices(TrainingConfig()) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert devices(TrainingConfig(num_drafter_ranks=2)) == [[0], [1]]
    with pytest.raises(UserError, match="4 ranks on this node, 2 CUDA devices"):
        devices(split(3, 1), num_devices=2)
    with pytest.raises(UserError, match="num_drafter_ranks: 1 does not divide by training.num_nodes"):
        devices(split(3, 1, nodes=2))


@pytest.mark.parametrize(
    "config",
    [TrainingConfig(), TrainingConfig(num_drafter_ranks=3), split(1, 1), split(2, 3), split(4, 2, nodes=2)],
)
def test_every_microbatch_is_captured_and_trained_once_in_its_step(
    config: TrainingConfig, schedule: Schedule
) -> None:
    layout = make_layout(config)
    for step in range(schedule.total_steps):
        epoch, local = schedule.locate(step)
        plan = schedule.plan(epoch)
        assignments = list(assignments_of_step(layout, schedule, step))
        expected = range(plan.step_offsets[local], plan.step_offsets[local + 1])
        assert sorted(a.microbatch for a in assignments) == list(expected)
        for a in assignments:
            drafters, targets = next(i for i in layout.islands if a.drafter in i[0])
            assert a.target in targets and a.step == step and a.epoch == epoch
    by_rank = [
        a
        for rank in layout.drafters
        for a in assignments_of_rank(layout, schedule, rank, num_validation_groups=0, first_step=0)
    ]
    assert len(by_rank) == sum(schedule.plan(e).num_microbatches for e in range(3))


def test_both_ends_of_a_pair_see_their_microbatches_in_one_order(schedule: Schedule) -> None:
    layout = make_layout(split(3, 2))
    walk = {
        rank: list(assignments_of_rank(layout, schedule, rank, num_validation_groups=3, first_step=1))
        for rank in range(5)
    }
    for drafter in layout.drafters:
        for target in layout.targets:
            sent = [a for a in walk[target] if a.drafter == drafter]
            taken = [a for a in walk[drafter] if a.target == target]
            assert sent == taken


def test_targets_share_an_uneven_remainder(schedule: Schedule) -> None:
    layout = make_layout(split(2, 1))
    steps = [list(assignments_of_step(layout, schedule, s)) for s in range(schedule.total_steps)]
    counts = np.bincount([a.target for step in steps for a in step], minlength=3)[1:]
    uneven = sum(len(step) % 2 for step in steps)  # without the shift, target 1 would get one more in each
    assert uneven > 2 and abs(int(counts[0]) - int(counts[1])) <= uneven // 2
    assert {step[0].target for step in steps} == {1, 2}


def test_a_resume_continues_with_the_next_step(schedule: Schedule) -> None:
    layout = make_layout(TrainingConfig())
    whole = list(assignments_of_rank(layout, schedule, 0, num_validation_groups=0, first_step=0))
    for step in (1, schedule.first_step[1] - 1, schedule.first_step[1], schedule.total_steps - 1):
        rest = list(assignments_of_rank(layout, schedule, 0, num_validation_groups=0, first_step=step))
        assert rest == [a for a in whole if a.step >= step]


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


def test_advice_names_the_slower_side_and_the_better_split() -> None:
    advice = split_advice(300.0, 100.0, num_targets=2, num_drafters=2, split=True)
    assert "targets are the bottleneck" in advice
    assert "busy 33% of the time" in advice  # 50 of 150 s
    assert "3+1 (targets+drafters) would give about 1.50x" in advice
    assert "this split is the best" in split_advice(300.0, 100.0, num_targets=3, num_drafters=1, split=True)
    assert "drafters are the bottleneck" in split_advice(
        10.0, 100.0, num_targets=1, num_drafters=1, split=True
    )


def test_a_plan_of_other_shards_is_refused(store: TokenStore, tmp_path: Path) -> None:
    plan = build_plan(np.full(500, 10, np.int32), BatchingConfig(token_budget=100), seed=0, epoch=0)
    save_plan(plan, tmp_path / "plan.parquet")
    with pytest.raises(UserError, match="plan of 500 or more samples, the shards hold"):
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
        mine = together.anchors[together.anchor_sample == i] - first
        assert mine.tolist() == alone.anchors.tolist()
    assert (np.diff(together.anchors) > 0).all()
    other_epoch = build_microbatch(store, rows, 0, num_anchors=6, seed=3, epoch=2)
    assert other_epoch.anchors.tolist() != together.anchors.tolist()


def test_a_sample_without_anchors_is_still_in_its_microbatch(store: TokenStore) -> None:
    row = store.train_indices[store.num_eligible[store.train_indices] == 0][:1]
    microbatch = build_microbatch(store, row, 0, num_anchors=6, seed=0, epoch=0)
    assert len(microbatch.anchors) == 0 and microbatch.num_tokens == store.lengths[row[0]]


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
            assert slots <= 100 and (width == 0) == packed
    dealt = list(validation_assignments(make_layout(split(2, 2)), 5))
    assert [a.drafter for a in dealt] == [0, 1, 0, 1, 0]
    assert {a.step for a in dealt} == {-1}


def test_the_prefetcher_keeps_order_and_hands_errors_on() -> None:
    items = [Assignment(0, i, 0, i, 0, 0) for i in range(20)]
    feed = Prefetcher(iter(items), lambda a: a.slot * 2, depth=3)
    assert [(a.slot, value) for a, value in feed] == [(i, 2 * i) for i in range(20)]

    def fails(assignment: Assignment) -> int:
        if assignment.slot == 2:
            raise UserError("tokens.bin: cut short")
        return 0

    broken = Prefetcher(iter(items), fails, depth=3)
    next(broken), next(broken)
    with pytest.raises(UserError, match="cut short"):
        next(broken)
    broken.close()


def test_the_prefetcher_runs_ahead_only_so_far_and_stops_when_closed() -> None:
    made: list[int] = []
    items = (Assignment(0, i, 0, i, 0, 0) for i in range(10**9))
    feed = Prefetcher(items, lambda a: made.append(a.slot), depth=2)
    next(feed)
    feed.close()
    assert len(made) <= 1 + 2 + 2  # taken, queued, one in the hand, one being made
    assert not feed._thread.is_alive()
