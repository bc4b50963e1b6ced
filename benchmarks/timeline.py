"""Simulated timeline of a run: a plan's real assignments with a given duration per piece of work.

It follows `transfer.py` and `loop.py`: a target captures in order and has at most `max_inflight` microbatches
sent and not yet received, a drafter posts as many receives and trains in order, and all drafters wait for
each other at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.dataflow.assignment import Assignment, assignments_of_step
from dflash_core.dataflow.schedule import Schedule
from dflash_core.launch.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of each piece of work, by assignment."""

    capture: Callable[[Assignment], float]
    train: Callable[[Assignment], float]
    transfer: Callable[[Assignment], float]  # on a link, once both ends are ready
    step: float  # reductions and update at the end of a step


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation; a busy share is that of the whole time, over the ranks of a role."""

    step_ends: list[float]  # seconds from the start
    target_busy: float
    drafter_busy: float

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]


def simulate(
    layout: Layout, schedule: Schedule, rates: Rates, *, steps: range, max_inflight: int
) -> Timeline:
    """Return the timeline of `steps`.

    Each time that a microbatch depends on belongs to an earlier one in plan order, so one pass in that order
    is exact, without an event queue.
    """
    drafter_free = dict.fromkeys(layout.drafters, 0.0)
    target_free = dict.fromkeys(layout.targets, 0.0)
    link_free = dict.fromkeys({*layout.drafters, *layout.targets}, 0.0)
    # Of each target's microbatches, in order.
    arrivals: dict[int, list[float]] = {t: [] for t in layout.targets}
    requested: dict[int, list[float]] = {d: [] for d in layout.drafters}  # of each drafter's n-th microbatch
    counts = dict.fromkeys(layout.drafters, 0)
    busy_targets = busy_drafters = 0.0
    ends = []
    for step in steps:
        for a in assignments_of_step(layout, schedule, step):
            capture, train = rates.capture(a), rates.train(a)
            busy_targets, busy_drafters = busy_targets + capture, busy_drafters + train
            if not layout.split:
                drafter_free[a.drafter] += capture + train
                continue
            sent = target_free[a.target] + capture
            if len(arrivals[a.target]) >= max_inflight:
                sent = max(sent, arrivals[a.target][-max_inflight])
            target_free[a.target] = sent
            # With the request for its n-th microbatch a drafter posts receives up to n + max_inflight - 1.
            requested[a.drafter].append(drafter_free[a.drafter])
            n = counts[a.drafter] - (max_inflight - 1)
            posted = requested[a.drafter][n] if n > 0 else 0.0
            arrival = max(sent, posted, link_free[a.target], link_free[a.drafter]) + rates.transfer(a)
            link_free[a.target] = link_free[a.drafter] = arrival
            arrivals[a.target].append(arrival)
            counts[a.drafter] += 1
            drafter_free[a.drafter] = max(drafter_free[a.drafter], arrival) + train
        end = max(drafter_free.values()) + rates.step
        drafter_free = dict.fromkeys(drafter_free, end)
        ends.append(end)
    seconds = ends[-1]
    return Timeline(
        ends,
        busy_targets / (seconds * len(layout.targets)),
        busy_drafters / (seconds * len(layout.drafters)),
    )
