"""Hand-made metrics of runs, and their comparison."""

from __future__ import annotations

import numpy as np

from dflash_core import run_statistics
from dflash_core.run_statistics import RunMetrics


def run_metrics(strategy: str = "packed", seed: int = 0, steps: int = 40, **changes) -> RunMetrics:
    values = {
        "loss": np.linspace(4.0, 2.0, steps),
        "grad_norm": np.ones(steps),
        "tokens": np.full(steps, 100.0),
        "samples": np.full(steps, 5.0),
        "seconds": np.full(steps, 2.0),
        "capture_seconds": np.full(steps, 0.5),
        "drafter_seconds": np.full(steps, 1.0),
        "mean_length": np.full(steps, 20.0),
        "source_shares": np.ones((steps, 1)),
        "epoch": np.zeros(steps, np.int64),
    } | changes
    return RunMetrics(strategy=strategy, seed=seed, **values)


def summarise(runs: list, **changes) -> dict:
    keys = [(run.strategy, run.seed) for run in runs]
    figures = {"padding_efficiency": 0.9, "mixing_step": 1.0, "mixing_microbatch": 1.0}
    plans = {strategy: dict(figures) for strategy, _ in keys}
    plans.get("sorted", {})["mixing_step"] = 30.0
    given = {
        "plans": plans,
        "summaries": {key: {"updates": 40, "validation_last": {"validation/loss": 2.5}} for key in keys},
        "evaluations": {
            key: {"acceptance_length": 1.2, "acceptance_interval": [1.1, 1.3], "lossless": True}
            for key in keys
        },
        "initial_losses": dict.fromkeys(keys, 5.0),
    } | changes
    return run_statistics.summarise(runs, **given)
