"""Assignment of microbatches to ranks: which target rank captures one, which drafter rank trains on it.

A pure function of the plan, the step and the layout, so all ranks derive it without communication, and each
pair of ranks exchanges its microbatches in plan order. The steps are the same at any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_core.dataflow.schedule import VALIDATION_STEP, Schedule
from dflash_core.launch.layout import Layout


@dataclass(frozen=True)
class Assignment:
    """One microbatch of a run: its place in the run, and the global ranks that capture it and train on it."""

    step: int  # 0-based, over all epochs
    slot: int  # ordinal among the drafter's microbatches of the step
    epoch: int
    microbatch: int  # of the epoch's plan
    target: int
    drafter: int


def assignments_of_step(layout: Layout, schedule: Schedule, step: int) -> Iterator[Assignment]:
    """Yield the microbatches of a step in the order of capture and training, idle places left out.

    Within an island, microbatch number i of a step (over slots, then drafters) goes to target (step + i) mod
    T: the shift by the step spreads an uneven remainder. With 1 drafter and 2 targets, three microbatches of
    step 0 are captured by targets 0, 1, 0 and those of step 1 by targets 1, 0, 1.
    """
    epoch, local = schedule.locate(step)
    plan = schedule.plan(epoch)
    order = dict(zip(layout.drafters, plan.assign_to_ranks(len(layout.drafters), local)))
    for drafters, targets in layout.islands:
        number = step
        for slot in range(max(len(order[rank]) for rank in drafters)):
            for rank in drafters:
                microbatch = int(order[rank][slot])
                if microbatch >= 0:
                    yield Assignment(step, slot, epoch, microbatch, targets[number % len(targets)], rank)
                    number += 1


def validation_assignments(layout: Layout, num_groups: int) -> Iterator[Assignment]:
    """Yield the validation microbatches, assigned to the drafters in turn; they come before all steps."""
    islands = {rank: island for island in layout.islands for rank in island[0]}
    for group in range(num_groups):
        rank = layout.drafters[group % len(layout.drafters)]
        targets = islands[rank][1]
        yield Assignment(VALIDATION_STEP, group, 0, group, targets[group % len(targets)], rank)


def assignments_of_rank(
    layout: Layout, schedule: Schedule, rank: int, *, num_validation_groups: int, steps: range
) -> Iterator[Assignment]:
    """Yield the microbatches that a rank captures or trains on: validation, then these steps."""
    role = "drafter" if rank in layout.drafters else "target"
    of_steps = (assignments_of_step(layout, schedule, step) for step in steps)
    for assignments in itertools.chain([validation_assignments(layout, num_validation_groups)], of_steps):
        yield from (a for a in assignments if getattr(a, role) == rank)
