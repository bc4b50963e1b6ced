"""Validation on fixed samples with fixed anchors: the same blocks at every step, in every run on the same
data.

States are captured once at the start and kept (on the CPU when the run is on a GPU). Numbers are sums over
all drafter ranks, so they do not depend on how many there are.
"""

from __future__ import annotations

from dflash_core.objective.loss import LossSums


def accuracy_by_position(sums: LossSums, prefix: str) -> dict[str, float]:
    """`<prefix>/accuracy_position_k` for k = 1..B-1."""
    return {f"{prefix}/accuracy_position_{k}": a for k, a in enumerate(sums.accuracy_K()) if k > 0}


def validation_metrics(sums: LossSums) -> dict[str, float]:
    """The line of a validation: loss, accuracy by position, simulated acceptance length with its 95%
    interval.
    """
    mean, low, high = sums.simulated_acceptance_length()
    return {
        "validation/loss": sums.loss(),
        **accuracy_by_position(sums, "validation"),
        "validation/simulated_acceptance_length": mean,
        "validation/simulated_acceptance_length_low": low,
        "validation/simulated_acceptance_length_high": high,
    }
