"""The number of steps that fit into `training.max_minutes`, from seconds that a person can add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_core.training.time_budget import Pace, num_rehearsed, steps_within

PACE = Pace(step=2.0, cached_step=0.5, capture_end=10**6, validation=0.0, validate_every=10)


@pytest.mark.parametrize(("seconds", "steps"), [(-5, 0), (1.9, 0), (2, 1), (9, 4), (1000, 20)])
def test_steps_of_one_pace(seconds: float, steps: int) -> None:
    assert steps_within(seconds, PACE, 20) == steps


def test_validations_count_at_their_steps_and_at_the_end() -> None:
    pace = replace(PACE, validation=5.0)
    # Twelve steps are validated at 10 and 12, ten and five steps once.
    assert [pace.seconds(steps) for steps in (5, 10, 12)] == [15, 25, 34]
    assert steps_within(33.9, pace, 100) == 11


def test_steps_after_the_first_epoch_of_a_cached_run_are_faster() -> None:
    pace = replace(PACE, capture_end=3)
    assert pace.seconds(5) == 3 * 2.0 + 2 * 0.5
    assert steps_within(7.0, pace, 100) == 5


def test_the_rehearsal_takes_a_small_share_of_the_time() -> None:
    assert num_rehearsed(180, 0.45) == 12
    assert num_rehearsed(60, 30) == 2
    assert num_rehearsed(86_400, 0.1) == 50
    assert num_rehearsed(60, 0.0) == 50
