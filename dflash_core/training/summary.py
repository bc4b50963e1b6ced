"""What a run says when it is over: counters, and who waited for whom."""

from __future__ import annotations

import resource
from typing import Any

import torch

from dflash_core.launch.rank_status import read_records
from dflash_core.training.checkpoint import State
from dflash_core.training.run import Run


def summarise(state: State, run: Run, exported_step: int | None, advice: str) -> dict[str, Any]:
    """Counters of the whole run, resumed parts included; what the report's `train` and `validation` come
    from.

    `advice`: who waited for whom, see `topology.split_advice`.
    """
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated()
    return {
        "run_key": run.run_key,
        "steps": state.step,
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


def seconds_by_role(run: Run) -> dict[str, dict[str, float]]:
    """Seconds that the processes of each role spent since they started, by the first word of what they were doing,
    as their hosts see it: on CUDA captures and training are queued in no time and waited for elsewhere.
    """
    by_role: dict[str, dict[str, float]] = {}
    for record in read_records(run.directory):
        seconds = by_role.setdefault(record["role"], {})
        for kind, value in record["seconds"].items():
            seconds[kind] = seconds.get(kind, 0.0) + value
    return by_role
