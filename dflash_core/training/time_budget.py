"""`training.max_minutes`: as many steps as fit into a time on this machine, found before the first step.

A run begins as always, with its validation at step 0. Then it rehearses some of its first steps: they run as
in training, over the same ranks, but change nothing. Their pace gives the number of steps that fit, which
ends the schedule. So the result is that of `training.max_steps` with this number, bit for bit. The checkpoint
holds the number, and a run that resumes keeps it.

Price: one step and about `REHEARSED_SHARE` of the time. The time counts from the start of the ranks' work to
the end of the last step; what a run lost before it resumed is not counted.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dflash_core.dataflow.schedule import Schedule
from dflash_core.errors import UserError
from dflash_core.launch.process_groups import World
from dflash_core.training.console import duration
from dflash_core.training.loop import Trainer
from dflash_core.training.run import RunSpec

# Of the time, for the rehearsal.
REHEARSED_SHARE = 0.03
MIN_REHEARSED, MAX_REHEARSED = 2, 50
# Of the time, left free for checkpoints, the export and steps that are slower than the rehearsed ones.
RESERVED_SHARE = 0.03

# The clock; tests replace it.
now = time.monotonic


class Stretch(Protocol):
    """Work on some steps of a run: `work` on a rank that trains, captures for it on a target rank."""

    def __call__(self, steps: range, work: Callable[[], None], *, num_groups: int = 0) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a run's parts on this machine."""

    step: float
    # of a step whose captured states come from a cache
    cached_step: float
    # the first step with such states
    capture_end: int
    validation: float
    # steps between validations
    validate_every: int

    def seconds(self, steps: int) -> float:
        """Predict the seconds of so many steps with their validations, that of step 0 left out."""
        capturing = min(steps, self.capture_end)
        # Every `validate_every` steps and at the end, once where the two meet.
        validations = -(-steps // self.validate_every)
        return (
            capturing * self.step
            + (steps - capturing) * self.cached_step
            + (validations * self.validation if self.validation else 0.0)
        )


def steps_within(seconds: float, pace: Pace, planned_steps: int) -> int:
    """Return the largest number of steps, at most the planned ones, that fit into so many seconds."""
    return max(0, bisect.bisect_right(range(planned_steps + 1), seconds, key=pace.seconds) - 1)


def num_rehearsed(limit_seconds: float, step_seconds: float) -> int:
    """Return the number of steps to rehearse: about `REHEARSED_SHARE` of the time, within the limits."""
    wanted = REHEARSED_SHARE * limit_seconds / step_seconds if step_seconds > 0 else MAX_REHEARSED
    return round(min(MAX_REHEARSED, max(MIN_REHEARSED, wanted)))


def fit_steps(
    run: RunSpec,
    world: World,
    schedule: Schedule,
    trainer: Trainer | None,
    stretch: Stretch,
    *,
    num_groups: int,
    started: float,
) -> int:
    """Begin the run, rehearse, and return the number of steps that fit into `training.max_minutes`.

    Collective over all ranks; the clock of rank 0 decides.

    Args:
        trainer: of this rank; None on a target rank.
        num_groups: validation microbatches, over all ranks.
        started: when the ranks started their work, by `now`.

    Raises:
        UserError: not even one step fits.
    """
    minutes, planned = run.config.training.max_minutes, schedule.planned_steps
    assert minutes is not None
    validation = step = capture = 0.0

    def begin() -> None:
        nonlocal validation, step
        assert trainer is not None
        trainer.begin()
        begun = now()
        trainer.validate_when_due()
        validated = now()
        trainer.rehearse(range(1))
        validation, step = (validated - begun if num_groups else 0.0), now() - validated

    def rehearse() -> None:
        nonlocal step, capture
        assert trainer is not None
        begun = now()
        capture = trainer.rehearse(steps) / len(steps)
        step = (now() - begun) / len(steps)

    stretch(range(1), begin, num_groups=num_groups)
    count = world.broadcast(num_rehearsed(60 * minutes, step))
    # The first step, which loads and compiles what the others use, does not count where there are others.
    steps = range(planned)[1 : 1 + count] or range(1)
    stretch(steps, rehearse)
    pace = Pace(
        step=step,
        cached_step=max(0.0, step - capture) if not world.layout.split else step,
        capture_end=schedule.first_step[1] if run.config.target.cache != "none" else planned,
        validation=validation,
        validate_every=run.config.training.validate_every,
    )
    elapsed = now() - started
    fitting = steps_within(60 * minutes * (1 - RESERVED_SHARE) - elapsed, pace, planned)
    total, needed = world.broadcast((fitting, elapsed + pace.seconds(1)))
    if total < 1:
        raise UserError(
            f"training.max_minutes: {minutes:g} is not allowed: one step would end after "
            f"{duration(needed)} on this machine; allowed: a longer time, for many steps, or null"
        )
    if trainer is not None:
        trainer.end_at(total)
        if world.is_leader:
            text = f"{total} of {planned} steps at {step:.2f} s per step"
            expected = duration(elapsed + pace.seconds(total))
            trainer.console.print_line(f"training.max_minutes {minutes:g}: {text}, about {expected} in all")
    return int(total)
