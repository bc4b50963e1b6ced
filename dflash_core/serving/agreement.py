"""Do a serving engine and the evaluator accept the same drafts? Counts of both on the same continuations.

Both sides count whole steps: `accepted[k - 1]` of `steps` verifications kept the drafts 1..k. Acceptance length
here is 1 + sum(accepted) / steps, the engine's own definition; it differs from the evaluator's report by the last
step of each prompt, which a report cuts where the answer ends.

Agreement, all of it:
- at least `MIN_STEPS` steps on both sides;
- at every position the rate of each side lies inside the other's 95% interval (Wilson's, which holds at rates
  near 0);
- acceptance length - 1, the part that the drafter earns, differs by at most `LENGTH_TOLERANCE` of the engine's;
- of the steps that start at the same token and in which a side accepts a draft, at most `STEP_TOLERANCE` accept
  another number on the other side.

The intervals alone would let a drafter pass that is systematically worse by a few percent; the tolerance alone
would let one pass that is better at one position and worse at another; both let one pass whose drafts differ at every
tenth step, as often for better as for worse. That is what states of the next layer do to a drafter (12% of its steps),
and what an engine did that normed the keys of one layer wrongly (5%).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIN_STEPS = 3000
LENGTH_TOLERANCE = 0.05
STEP_TOLERANCE = 0.05
Z_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Verifications, and how many kept the drafts up to each position."""

    steps: int
    accepted: tuple[int, ...]  # by position 1..K - 1

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    @classmethod
    def of_steps(cls, accepted_by_step: Sequence[int], block_size: int) -> StepCounts:
        """From accepted drafts step by step: [2, 0, 1] with K = 4 -> accepted (2, 1, 0) of 3."""
        kept = tuple(sum(a >= k for a in accepted_by_step) for k in range(1, block_size))
        return cls(steps=len(accepted_by_step), accepted=kept)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a rate (Wilson 1927); [0, 1] without a trial."""
    if not trials:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


def compare_counts(engine: StepCounts, evaluator: StepCounts) -> dict[str, Any]:
    """Whether both agree, and by how much at which position, as JSON types."""
    positions = []
    for k, (a, b) in enumerate(zip(engine.accepted, evaluator.accepted, strict=True), start=1):
        of_engine, of_evaluator = wilson_interval(a, engine.steps), wilson_interval(b, evaluator.steps)
        rates = a / max(1, engine.steps), b / max(1, evaluator.steps)
        inside = of_evaluator[0] <= rates[0] <= of_evaluator[1] and of_engine[0] <= rates[1] <= of_engine[1]
        positions.append(
            {
                "position": k,
                "engine_accepted": a,
                "engine_rate": rates[0],
                "engine_interval": list(of_engine),
                "evaluator_accepted": b,
                "evaluator_rate": rates[1],
                "evaluator_interval": list(of_evaluator),
                "agrees": inside,
            }
        )
    earned = engine.acceptance_length - 1, evaluator.acceptance_length - 1
    difference = abs(earned[0] - earned[1])
    enough = min(engine.steps, evaluator.steps) >= MIN_STEPS
    within = difference <= LENGTH_TOLERANCE * earned[0]
    rates_agree = within and all(p["agrees"] for p in positions)
    return {
        "agrees": enough and rates_agree,
        "enough_steps": enough,
        "rates_agree": rates_agree,
        "engine_steps": engine.steps,
        "evaluator_steps": evaluator.steps,
        "engine_acceptance_length": engine.acceptance_length,
        "evaluator_acceptance_length": evaluator.acceptance_length,
        "relative_difference": difference / earned[0] if earned[0] else None,
        "length_agrees": within,
        "positions": positions,
    }


def compare_steps(engine: Sequence[Sequence[int]], evaluator: Sequence[Sequence[int]]) -> dict[str, int]:
    """Step by step where both verify from the same token: who accepted more, how often; `accepting`: steps in which a
    side accepted a draft.

    Args:
        engine, evaluator: by prompt, tokens emitted by each step. A last step is cut by one side and not by the
            other, so it is left out.
    """
    counts = {"equal": 0, "engine_more": 0, "evaluator_more": 0, "accepting": 0}
    for ours, theirs in zip(evaluator, engine, strict=True):
        starts = [_by_start(emitted) for emitted in (theirs, ours)]
        for start in starts[0].keys() & starts[1].keys():
            a, b = starts[0][start], starts[1][start]
            counts["equal" if a == b else "engine_more" if a > b else "evaluator_more"] += 1
            counts["accepting"] += max(a, b) > 1
    return counts


def steps_agree(counts: dict[str, int]) -> bool:
    """`compare_steps` within `STEP_TOLERANCE`."""
    return counts["engine_more"] + counts["evaluator_more"] <= STEP_TOLERANCE * counts["accepting"]


def _by_start(emitted: Sequence[int]) -> dict[int, int]:
    """New token at which each step but the last starts, and what it emitted: [2, 1, 3] -> {0: 2, 2: 1}."""
    starts, at = {}, 0
    for count in emitted[:-1]:
        starts[at] = count
        at += count
    return starts
