"""Agreement of a serving engine and the evaluator on the drafts they accept along the same texts.

Both sides count whole steps: `accepted[k - 1]` of `steps` verifications accepted the drafts 1..k. Acceptance
length here is 1 + sum(accepted) / steps, the engine's own definition; it differs from the evaluator's report
by the last step of each prompt, which a report cuts where the answer ends.

Agreement requires all of:
- at least `MIN_STEPS` steps on both sides;
- at every position the rate of each side lies inside the other's 95% interval (Wilson's, which holds at rates
  near 0);
- acceptance length - 1, the part that the drafter earns, differs by at most `LENGTH_TOLERANCE` of the
  engine's;
- of the steps that start at the same token and in which a side accepts a draft, at most `STEP_TOLERANCE`
  accept another number on the other side.

The intervals alone would pass a drafter that is systematically worse by a few percent; the tolerance alone
would pass one that is better at one position and worse at another; both would pass one whose drafts differ at
every tenth step, as often for better as for worse. Features of the next layer have that last effect on a
drafter (12% of its steps), and so has an engine that normalises the keys of one layer wrongly (5%).
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
    """Number of verifications, and of those that accepted the drafts up to each position 1..K - 1."""

    steps: int
    accepted: tuple[int, ...]

    @property
    def engine_acceptance_length(self) -> float:
        """Acceptance length by the engine's definition: every step counts in full, the last one too."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    @classmethod
    def of_steps(cls, accepted_by_step: Sequence[int], block_size: int) -> StepCounts:
        """Count accepted drafts given step by step: [2, 0, 1] with K = 4 -> accepted (2, 1, 0) of 3."""
        accepted = tuple(sum(a >= k for a in accepted_by_step) for k in range(1, block_size))
        return cls(steps=len(accepted_by_step), accepted=accepted)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a rate (Wilson 1927); [0, 1] without a trial."""
    if not trials:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z_95**2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    low = 0.0 if successes == 0 else centre - half
    return low, 1.0 if successes == trials else centre + half


def compare_counts(engine: StepCounts, evaluator: StepCounts) -> dict[str, Any]:
    """Compare the rates at each position and the acceptance lengths; returns JSON types."""
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
    earned = engine.engine_acceptance_length - 1, evaluator.engine_acceptance_length - 1
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
        "engine_acceptance_length": engine.engine_acceptance_length,
        "evaluator_acceptance_length": evaluator.engine_acceptance_length,
        "relative_difference": difference / earned[0] if earned[0] else None,
        "length_agrees": within,
        "positions": positions,
    }


def compare_steps(engine: Sequence[Sequence[int]], evaluator: Sequence[Sequence[int]]) -> dict[str, int]:
    """Count the steps that start at the same token on both sides, by the side that accepted more drafts.

    Args:
        engine, evaluator: by prompt, tokens emitted by each step. A last step is cut by one side and not by
            the other, so it is left out.

    Returns:
        Counts `equal`, `engine_more`, `evaluator_more`, and `accepting`: steps in which a side accepted a
            draft.
    """
    counts = {"equal": 0, "engine_more": 0, "evaluator_more": 0, "accepting": 0}
    for engine_steps, evaluator_steps in zip(engine, evaluator, strict=True):
        by_engine, by_evaluator = _by_start(engine_steps), _by_start(evaluator_steps)
        for start in by_engine.keys() & by_evaluator.keys():
            a, b = by_engine[start], by_evaluator[start]
            counts["equal" if a == b else "engine_more" if a > b else "evaluator_more"] += 1
            counts["accepting"] += max(a, b) > 1
    return counts


def steps_agree(counts: dict[str, int]) -> bool:
    """Return True when the counts of `compare_steps` differ by at most `STEP_TOLERANCE`."""
    return counts["engine_more"] + counts["evaluator_more"] <= STEP_TOLERANCE * counts["accepting"]


def _by_start(emitted: Sequence[int]) -> dict[int, int]:
    """Map the start of each step but the last to the tokens it emitted: [2, 1, 3] -> {0: 2, 2: 1}."""
    by_start, start = {}, 0
    for count in emitted[:-1]:
        by_start[start] = count
        start += count
    return by_start
