"""Predicted against measured speeds of strategies, and the constant that explains the difference.

Part of `benchmarks.batching` (`--measured`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dflash_core.batching.cost import REFERENCE, CostModel, Work

_CAPTURE_TERMS = ("capture_slot", "capture_pair", "capture_microbatch")


@dataclass(frozen=True, kw_only=True)
class SpeedCheck:
    """Predicted against measured speed, both relative to one strategy."""

    predicted: dict[str, float]
    measured: dict[str, float]
    residual: dict[str, float]  # predicted / measured - 1
    same_ranking: bool
    # term -> factor on its constant at which the worst residual vanishes
    explanation: dict[str, float]
    # term -> largest residual among the other strategies at that factor
    explained_residual: dict[str, float]


def check_speeds(
    work: Mapping[str, Work],
    measured_tokens_per_second: Mapping[str, float],
    *,
    relative_to: str,
    model: CostModel = REFERENCE,
) -> SpeedCheck:
    """Compare predicted with measured capture speed, and find the constant that would explain the residual.

    Speeds are ratios to `relative_to`, so the device's absolute speed cancels. The target's forward is taken
    as the bottleneck (most devices of a split run it). For each of its terms, the factor on the term's
    constant is searched at which the strategy with the worst residual fits exactly; `explained_residual` is
    the largest residual of the others then.
    """
    # capture is linear in its constants: sums are enough
    units = {
        name: np.array([counted.slots.sum(), counted.pairs.sum(), len(counted.slots)]) / counted.tokens.sum()
        for name, counted in work.items()
    }

    def ratios(changed: CostModel) -> dict[str, float]:
        constants = np.array([getattr(changed, term) for term in _CAPTURE_TERMS])
        seconds = {name: float(unit @ constants) for name, unit in units.items()}
        return {name: seconds[relative_to] / seconds[name] for name in work}

    base = measured_tokens_per_second[relative_to]
    measured = {name: measured_tokens_per_second[name] / base for name in work}
    predicted = ratios(model)
    residual = {name: predicted[name] / measured[name] - 1 for name in work}
    worst = max(residual, key=lambda name: abs(residual[name]))
    explanation: dict[str, float] = {}
    explained: dict[str, float] = {}
    for term in _CAPTURE_TERMS:
        for factor in np.geomspace(1e-2, 1e4, 1201):
            changed = ratios(replace(model, **{term: getattr(model, term) * float(factor)}))
            now = {name: changed[name] / measured[name] - 1 for name in work}
            others = max((abs(now[name]) for name in work if name != worst), default=0.0)
            if abs(now[worst]) < 5e-3 and (term not in explained or others < explained[term]):
                explanation[term], explained[term] = float(factor), others
    return SpeedCheck(
        predicted=predicted,
        measured=measured,
        residual=residual,
        same_ranking=sorted(work, key=predicted.__getitem__) == sorted(work, key=measured.__getitem__),
        explanation=explanation,
        explained_residual=explained,
    )
