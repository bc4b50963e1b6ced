"""End-of-run summary: counters, results, seconds of each role, and advice on a better split of the ranks."""

from __future__ import annotations

import resource
from typing import Any

import torch

from dflash_core.launch.layout import Layout
from dflash_core.launch.rank_status import read_records
from dflash_core.training.run import RunSpec
from dflash_core.training.state import State


def summarise(
    state: State, run: RunSpec, *, planned_steps: int, exported_step: int | None, advice: str
) -> dict[str, Any]:
    """Return the contents of summary.json: counters of the whole run, resumed parts included.

    The report's `train` and `validation` sections are made of it.

    Args:
        state: after the last step.
        run: its directory holds the records of all ranks.
        planned_steps: those of the plans, of which training.max_minutes may have left out the last.
        exported_step: the step whose weights were exported.
        advice: see `split_advice`.
    """
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    return {
        "run_key": run.run_key,
        "steps": state.step,
        "planned_steps": planned_steps,
        "updates": state.updates,
        "samples": state.samples,
        "tokens": state.tokens,
        "tokens_per_second": state.tokens / state.train_seconds if state.train_seconds else 0.0,
        "train_seconds": state.train_seconds,
        "capture_seconds": state.capture_seconds,
        "drafter_seconds": state.drafter_seconds,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "nonfinite_steps": state.nonfinite_steps,
        "validation_first": state.validation_first,
        "validation_last": state.validation_last,
        "best_step": state.best_step,
        "best_validation_loss": state.best_value,
        "exported_step": exported_step,
        "peak_memory_bytes": memory,
        "mlflow_run_id": state.mlflow_run_id,
        "roles": {"seconds": seconds_by_role(run), "advice": advice},
    }


def seconds_by_role(run: RunSpec) -> dict[str, dict[str, float]]:
    """Return the seconds of each role by the first word of the phase, since its processes started.

    These are seconds of the hosts, which on CUDA queue captures and training and wait in another phase.
    """
    by_role: dict[str, dict[str, float]] = {}
    for record in read_records(run.directory):
        seconds = by_role.setdefault(record["role"], {})
        for kind, value in record["seconds"].items():
            seconds[kind] = seconds.get(kind, 0.0) + value
    return by_role


def split_advice(capture_seconds: float, train_seconds: float, layout: Layout) -> str:
    """Return a sentence on which role waits for the other, and the split of the ranks that would be faster.

    Args:
        capture_seconds: work of all ranks together on captures.
        train_seconds: work of all ranks together on training.
        layout: the ranks of each role.

    With T target ranks and D drafter ranks a run takes about max(capture / T, train / D): the slower side
    sets the pace. Colocated ranks take (capture + train) / N, less what overlaps on a GPU. Example: 300 s of
    capture and 100 s of training on 2+2 ranks: 150 s; 3+1 would take 100 s, 1.5 times as fast.
    """
    num_targets, num_drafters = len(layout.targets), len(layout.drafters)
    work = f"capture {capture_seconds:.1f} s, training {train_seconds:.1f} s of work"
    if not layout.split:
        return f"{work} on {num_drafters} colocated ranks"
    targets, drafters = capture_seconds / num_targets, train_seconds / num_drafters
    ranks = num_targets + num_drafters
    now = max(targets, drafters)
    best = min(range(1, ranks), key=lambda t: max(capture_seconds / t, train_seconds / (ranks - t)))
    best_seconds = max(capture_seconds / best, train_seconds / (ranks - best))
    slower = "targets" if targets > drafters else "drafters"
    share = min(targets, drafters) / now if now else 1.0
    bottleneck = f"{work}: {slower} are the bottleneck, the others busy {share:.0%} of the time"
    if best == num_targets or best_seconds >= 0.95 * now:
        return f"{bottleneck}; this split is the best"
    speedup = now / best_seconds
    return f"{bottleneck}: {best}+{ranks - best} (targets+drafters) would give about {speedup:.2f}x"
