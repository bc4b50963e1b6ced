"""What a run says when it is over: counters, who waited for whom, and what to change when memory was short."""

from __future__ import annotations

import resource
from typing import Any

import torch

from dflash_core.training.checkpoint import State
from dflash_core.training.setup import Run
from dflash_core.training.supervise import read_records
from dflash_core.training.topology import Layout, split_advice


def summarise(state: State, run: Run, exported_step: int | None, layout: Layout) -> dict[str, Any]:
    """Counters of the whole run, resumed parts included; what the report's `train` and `validation` come
    from.
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
        "roles": roles(run, layout),
    }


def roles(run: Run, layout: Layout) -> dict[str, Any]:
    """Seconds of this process's life that each role spent on what, and what follows for the split."""
    by_role: dict[str, dict[str, float]] = {}
    for record in read_records(run.directory):
        seconds = by_role.setdefault(record["role"], {})
        for kind, value in record["seconds"].items():
            seconds[kind] = seconds.get(kind, 0.0) + value
    work = [sum(s.get(kind, 0.0) for s in by_role.values()) for kind in ("capture", "train")]
    sizes = {"num_targets": len(layout.targets), "num_drafters": len(layout.drafters)}
    return {"seconds": by_role, "advice": split_advice(*work, **sizes, split=layout.split)}


def out_of_memory_advice(run: Run) -> str:
    """What to change, with the values that were too much."""
    batching, training = run.config.batching, run.config.training
    return (
        f"out of memory: lower training.max_draft_slots (now {training.max_draft_slots}; peak memory of the "
        "drafter "
        f"follows it, the result does not change), or batching.token_budget (now {batching.token_budget}; "
        "slots of "
        "the target's forward), or set training.parallel to fsdp2 (optimizer and master weights sharded)"
    )
