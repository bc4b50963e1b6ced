"""Paired differences of drafters that decoded the same prompts, from the records of their evaluations.

A prompt is the unit: both drafters' sums of one prompt are drawn together, so that what makes a prompt easy
or hard for all cancels. Differences are of ratios of sums, and every sum is in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_core.decoding.acceptance import central_95, resampled_sums
from dflash_core.decoding.speed import speedups

Records = Sequence[Mapping[str, Any]]  # one per prompt, see `Evaluation.records`
ALL = "all"


def compare_records(first: Records, second: Records) -> dict[str, Any]:
    """Return the differences second - first by prompt set, and pooled under `all`, as JSON types.

    Each holds `acceptance_length` and, where prompts were decoded one at a time, `speedup`.
    """
    pairs = list(zip(first, second, strict=True))
    for a, b in pairs:
        same = all(a[key] == b[key] for key in ("prompt_set", "prompt_tokens"))
        assert same, f"prompt {a['prompt']} differs between two evaluations of the same prompts"
    names = list(dict.fromkeys(str(a["prompt_set"]) for a, _ in pairs))
    groups = {name: [pair for pair in pairs if pair[0]["prompt_set"] == name] for name in names}
    return {name: _differences(group) for name, group in {**groups, ALL: pairs}.items()}


def _differences(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    steps = np.array(
        [[sum(a["emitted"]), len(a["emitted"]), sum(b["emitted"]), len(b["emitted"])] for a, b in pairs],
        dtype=np.float64,
    )
    singles = [
        [*a["one_at_a_time"], *b["one_at_a_time"]]
        for a, b in pairs
        if "one_at_a_time" in a and "one_at_a_time" in b
    ]
    return {
        "prompts": len(pairs),
        "acceptance_length": _difference(steps, lambda sums: sums[:, 0] / sums[:, 1], width=2),
        "speedup": _difference(np.array(singles), speedups, width=4) if singles else None,
    }


def _difference(rows: np.ndarray, ratio: Any, *, width: int) -> dict[str, Any] | None:
    """Return both ratios, their difference and its 95% interval; None where there was no step.

    Args:
        rows: [prompts, 2 * width], the sums of each prompt for the first, then for the second drafter.
        ratio: from sums [R, width] to values [R].

    The interval is None for fewer than two prompts with steps, which show no variation.
    """
    rows = rows[rows.all(axis=1)]
    if not len(rows):
        return None
    sums = rows.sum(0, keepdims=True)
    first, second = float(ratio(sums[:, :width])[0]), float(ratio(sums[:, width:])[0])
    interval = None
    if len(rows) > 1:
        drawn = resampled_sums(rows)
        interval = list(central_95(ratio(drawn[:, width:]) - ratio(drawn[:, :width])))
    return {
        "first": first,
        "second": second,
        "difference": second - first,
        "interval": interval,
        "prompts": len(rows),
        "first_sums": sums[0, :width].tolist(),
        "second_sums": sums[0, width:].tolist(),
    }
