"""What a comparison of strategies says, from the metrics of the runs: figures, statistics of the step loss,
one sentence.

The design is paired: all runs of a seed see the same samples with the same anchors from the same initial
    weights, in
steps closed by the same number of real tokens. What differs is who shares a microbatch and a step, and in
which order.

The statistics answer one worry: do steps that hold similar samples make the loss swing? In every epoch the
    step loss is
regressed on its trend (a cubic in the step), then on the trend, the step's mean length and the share of each
source:

    r2_composition = 1 - SSR(trend and composition) / SSR(trend)

is the share of the swings that composition explains, and the lag-1 autocorrelation of what is left shows
clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WARM_UP_STEPS = 3  # left out of throughput: compilation, first touches of memory
MAX_STEP_TOKENS_SPREAD = 0.02  # above this, runs took different steps and are not ranked
MIN_EFFICIENCY_OF_FEW_EDGES = 0.9


class Interval(NamedTuple):
    """A mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RunMetrics:
    """One run's steps as arrays, and the composition of each step."""

    strategy: str
    seed: int
    loss: NDArray[np.float64]  # [S]
    grad_norm: NDArray[np.float64]  # [S]
    tokens: NDArray[np.float64]  # [S] real tokens
    samples: NDArray[np.float64]  # [S]
    seconds: NDArray[np.float64]  # [S]
    capture_seconds: NDArray[np.float64]  # [S]
    drafter_seconds: NDArray[np.float64]  # [S]
    mean_length: NDArray[np.float64]  # [S]
    source_shares: NDArray[np.float64]  # [S, sources]
    epoch: NDArray[np.int64]  # [S]


def read_run(
    strategy: str,
    seed: int,
    lines: Sequence[Mapping[str, Any]],
    source_shares: NDArray[np.float64],
    epoch: NDArray[np.int64],
) -> RunMetrics:
    """The training lines of metrics.jsonl as arrays; `source_shares` and `epoch` have one row a planned
    step.
    """
    steps = [line for line in lines if line.get("train/loss") is not None]
    at = np.array([int(line["step"]) - 1 for line in steps], dtype=np.int64)

    def column(name: str) -> NDArray[np.float64]:
        values = [line.get(name) for line in steps]
        return np.array([np.nan if value is None else float(value) for value in values])

    return RunMetrics(
        strategy=strategy,
        seed=seed,
        loss=column("train/loss"),
        grad_norm=column("train/grad_norm"),
        tokens=column("batch/tokens"),
        samples=column("batch/num_samples"),
        seconds=column("perf/step_seconds"),
        capture_seconds=column("perf/capture_seconds"),
        drafter_seconds=column("perf/drafter_seconds"),
        mean_length=column("batch/mean_length"),
        source_shares=source_shares[at],
        epoch=epoch[at],
    )


def throughput(run: RunMetrics) -> dict[str, float]:
    """Real tokens a second, whole and of capture and drafter alone, without the first steps."""
    first = WARM_UP_STEPS if len(run.seconds) > 2 * WARM_UP_STEPS else 0
    tokens = run.tokens[first:].sum()

    def rate(seconds: NDArray[np.float64]) -> float:
        spent = float(np.nansum(seconds[first:]))
        return float(tokens / spent) if spent > 0 else float("nan")

    return {
        "tokens_per_second": rate(run.seconds),
        "capture_tokens_per_second": rate(run.capture_seconds),
        "drafter_tokens_per_second": rate(run.drafter_seconds),
        "capture_seconds": float(np.nansum(run.capture_seconds)),
        "drafter_seconds": float(np.nansum(run.drafter_seconds)),
    }


def loss_statistics(run: RunMetrics) -> dict[str, float]:
    """Swings of the step loss within an epoch and how far composition explains them; means over the epochs.

    Epochs with fewer steps than twice the regressors are left out; with none left the figures are NaN.
    """
    found: list[dict[str, float]] = []
    for epoch in np.unique(run.epoch):
        here = (run.epoch == epoch) & np.isfinite(run.loss)
        shares = run.source_shares[here][:, 1:]  # shares add up to 1: one is redundant
        composition = np.column_stack([run.mean_length[here], shares])
        one = regress_on_composition(run.loss[here], composition)
        if one is not None:
            norms = run.grad_norm[here]
            one["grad_norm_variance"] = float(np.nanvar(norms)) if len(norms) else float("nan")
            found.append(one)
    names = (
        "loss_variance",
        "loss_variance_around_trend",
        "r2_composition",
        "residual_lag1",
        "grad_norm_variance",
    )
    return {name: float(np.mean([one[name] for one in found])) if found else float("nan") for name in names}


def regress_on_composition(
    loss: NDArray[np.float64], composition: NDArray[np.float64]
) -> dict[str, float] | None:
    """The regressions of the module's docstring for the steps of one epoch; None when there are too few
    steps.

    Args:
        loss: [S].
        composition: [S, p]; columns that do not vary are left out.
    """
    varies = composition.std(axis=0) > 1e-12
    composition = composition[:, varies]
    steps = len(loss)
    if steps < 2 * (4 + composition.shape[1]):
        return None
    time = np.linspace(-1.0, 1.0, steps)
    trend = np.column_stack([np.ones(steps), time, time**2, time**3])
    around = loss - trend @ np.linalg.lstsq(trend, loss, rcond=None)[0]
    full = np.column_stack([trend, (composition - composition.mean(axis=0)) / composition.std(axis=0)])
    residual = loss - full @ np.linalg.lstsq(full, loss, rcond=None)[0]
    before, after = float(around @ around), float(residual @ residual)
    return {
        "loss_variance": float(loss.var()),
        "loss_variance_around_trend": before / steps,
        "r2_composition": 1.0 - after / before if before > 0 else 0.0,
        "residual_lag1": float(residual[:-1] @ residual[1:] / after) if after > 0 else 0.0,
    }


def last_window(runs: Sequence[RunMetrics]) -> int:
    """Steps over which a last loss is the mean: a tenth of the shortest run."""
    return max(1, min(len(run.loss) for run in runs) // 10)


def steps_to_reach(loss: NDArray[np.float64], level: float, window: int) -> int | None:
    """First step at which the mean loss of the last `window` steps is at or below `level`; None if never."""
    if len(loss) < window:
        return None
    means = np.convolve(loss, np.ones(window) / window, mode="valid")
    below = np.flatnonzero(means <= level)
    return int(below[0]) + window if len(below) else None


def summarise(
    runs: Sequence[RunMetrics],
    plans: Mapping[str, Mapping[str, float]],
    summaries: Mapping[tuple[str, int], Mapping[str, Any]],
    evaluations: Mapping[tuple[str, int], Mapping[str, Any]],
    initial_losses: Mapping[tuple[str, int], float],
) -> dict[str, Any]:
    """The comparison as JSON types.

    Args:
        plans: strategy -> plan figures.
        summaries, evaluations, initial_losses: (strategy, seed) -> the training's summary, the acceptance,
            and the mean loss of the initial weights over the first epoch.
    """
    strategies = list(dict.fromkeys(run.strategy for run in runs))
    window = last_window(runs)
    level = max(float(np.nanmean(run.loss[-window:])) for run in runs)
    table: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        mine = [run for run in runs if run.strategy == strategy]
        row: dict[str, Any] = dict(plans[strategy])
        for part in (throughput, loss_statistics):
            figures = [part(run) for run in mine]
            row |= {name: _finite(np.mean([f[name] for f in figures])) for name in figures[0]}
        row["updates"] = int(np.mean([summaries[strategy, run.seed]["updates"] for run in mine]))
        row["samples"] = int(np.mean([run.samples.sum() for run in mine]))
        row["tokens_per_step"] = float(np.mean([run.tokens.mean() for run in mine]))
        row["loss_last"] = float(np.mean([np.nanmean(run.loss[-window:]) for run in mine]))
        row["steps_to_level"] = [steps_to_reach(run.loss, level, window) for run in mine]
        initial = [
            initial_losses[strategy, run.seed] for run in mine if (strategy, run.seed) in initial_losses
        ]
        row["initial_loss"] = float(np.mean(initial)) if initial else None
        validation = [summaries[strategy, run.seed].get("validation_last") or {} for run in mine]
        values = [v["validation/loss"] for v in validation if "validation/loss" in v]
        row["validation_loss"] = float(np.mean(values)) if values else None
        row["validation_loss_by_seed"] = values
        row |= _acceptance([evaluations[strategy, run.seed] for run in mine])
        table[strategy] = row
    reference = table["sorted"]["tokens_per_second"] if "sorted" in table else None
    for row in table.values():
        row["throughput_ratio_to_sorted"] = row["tokens_per_second"] / reference if reference else None
    spread = _relative_spread([row["tokens_per_step"] for row in table.values()])
    result = {
        "strategies": table,
        "seeds": sorted({run.seed for run in runs}),
        "loss_level": level,
        "tokens_per_step_spread": spread,
        "ranked": spread <= MAX_STEP_TOKENS_SPREAD,
        "initial_loss_level": float(np.mean(list(initial_losses.values()))) if initial_losses else None,
        "initial_loss_spread": _initial_spread(initial_losses),
    }
    return {**result, "recommendation": recommend(result)}


def _finite(value: Any) -> float | None:
    """A figure as JSON has it; None where there is nothing to tell, such as a regression on too few steps."""
    return float(value) if np.isfinite(value) else None


def _relative_spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(abs(float(np.mean(values))), 1e-12)


def _initial_spread(initial_losses: Mapping[tuple[str, int], float]) -> float | None:
    """Largest relative difference between strategies of one seed; None where nothing was checked."""
    by_seed: dict[int, list[float]] = {}
    for (_, seed), loss in initial_losses.items():
        by_seed.setdefault(seed, []).append(loss)
    return max((_relative_spread(losses) for losses in by_seed.values()), default=None)


def _acceptance(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance over the seeds: mean, and the widest of the intervals (seeds share the prompts)."""
    lengths = [e["acceptance_length"] for e in evaluations if e.get("acceptance_length") is not None]
    if not lengths:
        return {"acceptance_length": None, "acceptance_interval": None, "lossless": None}
    lows, highs = zip(*(e["acceptance_interval"] for e in evaluations))
    return {
        "acceptance_length": float(np.mean(lengths)),
        "acceptance_interval": [float(min(lows)), float(max(highs))],
        "lossless": all(e["lossless"] for e in evaluations),
    }


def recommend(result: Mapping[str, Any]) -> str:
    """One sentence that the numbers support."""
    table = result["strategies"]
    if not result["ranked"]:
        return (
            f"No ranking: real tokens per step differ by {result['tokens_per_step_spread']:.1%} between "
            f"strategies, more than {MAX_STEP_TOKENS_SPREAD:.0%}; choose a tokens_per_step that is a larger "
            "multiple of the token budget."
        )
    fastest = max(row["tokens_per_second"] for row in table.values())
    # As good as the fastest: within 5%, which is what timings on a shared machine can tell apart.
    quick = [name for name, row in table.items() if row["tokens_per_second"] >= 0.95 * fastest]
    chosen = min(quick, key=lambda name: table[name]["mixing_step"])
    row = table[chosen]
    against = "sorted" if "sorted" in table and chosen != "sorted" else None
    sentence = (
        f"Use {chosen}: {row['tokens_per_second']:.0f} real tokens/s"
        + (f", {row['throughput_ratio_to_sorted']:.2f} times sorted" if against else "")
        + f", at a padding efficiency of {row['padding_efficiency']:.3f}, with steps whose mean length "
        f"varies {row['mixing_step']:.2f} times as much as in random samples"
    )
    if against:
        sentence += f" ({table['sorted']['mixing_step']:.2f} for sorted)"
    if row["validation_loss"] is not None:
        best = min(r["validation_loss"] for r in table.values() if r["validation_loss"] is not None)
        sentence += f", and a validation loss of {row['validation_loss']:.3f} (best of all {best:.3f})"
    return sentence + "."
