"""Assignment of microbatches to ranks: nothing lost, nothing twice, the same steps at any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.config import TrainingConfig
from dflash_core.dataflow.assignment import (
    assignments_of_rank,
    assignments_of_step,
    validation_assignments,
)
from dflash_core.dataflow.schedule import Schedule
from dflash_core.launch.layout import make_layout
from tests.support.layouts import split


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
            assert a.target in targets
            assert a.step == step
            assert a.epoch == epoch
    by_rank = [
        a
        for rank in layout.drafters
        for a in assignments_of_rank(
            layout, schedule, rank, num_validation_groups=0, steps=range(schedule.total_steps)
        )
    ]
    assert len(by_rank) == sum(schedule.plan(e).num_microbatches for e in range(3))


def test_both_ends_of_a_pair_see_their_microbatches_in_one_order(schedule: Schedule) -> None:
    layout = make_layout(split(3, 2))
    walk = {
        rank: list(
            assignments_of_rank(
                layout, schedule, rank, num_validation_groups=3, steps=range(1, schedule.total_steps)
            )
        )
        for rank in range(5)
    }
    for drafter in layout.drafters:
        for target in layout.targets:
            sent = [a for a in walk[target] if a.drafter == drafter]
            received = [a for a in walk[drafter] if a.target == target]
            assert sent == received


def test_targets_share_an_uneven_remainder(schedule: Schedule) -> None:
    layout = make_layout(split(2, 1))
    steps = [list(assignments_of_step(layout, schedule, s)) for s in range(schedule.total_steps)]
    counts = np.bincount([a.target for step in steps for a in step], minlength=3)[1:]
    # Without the shift, target 1 would get one more in each of them.
    uneven = sum(len(step) % 2 for step in steps)
    assert uneven > 2
    assert abs(int(counts[0]) - int(counts[1])) <= uneven // 2
    assert {step[0].target for step in steps} == {1, 2}


def test_a_resume_continues_with_the_next_step(schedule: Schedule) -> None:
    layout = make_layout(TrainingConfig())
    whole = list(
        assignments_of_rank(layout, schedule, 0, num_validation_groups=0, steps=range(schedule.total_steps))
    )
    for step in (1, schedule.first_step[1] - 1, schedule.first_step[1], schedule.total_steps - 1):
        rest = list(
            assignments_of_rank(
                layout, schedule, 0, num_validation_groups=0, steps=range(step, schedule.total_steps)
            )
        )
        assert rest == [a for a in whole if a.step >= step]


def test_validation_microbatches_go_to_the_drafters_in_turn() -> None:
    assignments = list(validation_assignments(make_layout(split(2, 2)), 5))
    assert [a.drafter for a in assignments] == [0, 1, 0, 1, 0]
    assert {a.step for a in assignments} == {-1}
