"""What each strategy would cost, before training: predicted seconds from the plans and the target's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.batching.cost import CostModel, Work
from dflash_core.config import RunConfig

CPU_FLOPS, GPU_FLOPS = 1e11, 4e14  # sustained, where nothing was measured
CAPTURE_PARTS = ("capture_slots", "capture_attention", "capture_fixed")


def cost_model(
    target_directory: Path, config: RunConfig, measured: Mapping[str, Any] | None, plan: Any
) -> CostModel:
    """Constants from the shapes of target and drafter, scaled to a measured run where there is one.

    Args:
        measured: `summary.json` of a run with the same target and drafter; None: an assumed rate of the
            device.
        plan: a `BatchPlan` of one epoch of that run's strategy, to compare predicted with measured seconds.
    """
    shape = json.loads((target_directory / "config.json").read_text(encoding="utf-8"))
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    on_cpu = config.training.device == "cpu" or (
        config.training.device == "auto" and not list(Path("/dev").glob("nvidia[0-9]*"))
    )
    model = CostModel.from_shapes(
        # labels from the target need all of its layers, else those up to the last captured one
        target_layers=layers if config.objective.labels == "target" else max(1, layers - 3),
        hidden_size=hidden,
        intermediate_size=shape["intermediate_size"],
        kv_size=(shape.get("num_key_value_heads") or heads) * head_dim,
        vocab_size=shape["vocab_size"],
        num_captured_layers=config.drafter.num_captured_layers,
        draft_layers=config.drafter.num_layers,
        flops_per_second=CPU_FLOPS if on_cpu else GPU_FLOPS,
        seconds_per_microbatch=2e-2 if on_cpu else 5e-3,
    )
    if measured is None or not measured.get("tokens"):
        return model
    parts = {name: float(seconds.sum()) for name, seconds in model.parts(plan.work).items()}
    epochs = measured["tokens"] / max(1, int(plan.tokens.sum()))
    capture = measured["capture_seconds"] / epochs / sum(parts[name] for name in CAPTURE_PARTS)
    rest = sum(seconds for name, seconds in parts.items() if name not in CAPTURE_PARTS)
    train = measured["drafter_seconds"] / epochs / rest
    scales = {name: capture if name.startswith("capture") else train for name in vars(model)}
    return replace(model, **{name: value * scales[name] for name, value in vars(model).items()})


def predict(plan: Any, model: CostModel) -> dict[str, float]:
    """Predicted seconds of one epoch: all, capture and drafter, and real tokens a second."""
    work: Work = plan.work
    parts = {name: float(seconds.sum()) for name, seconds in model.parts(work).items()}
    capture = sum(parts[name] for name in CAPTURE_PARTS)
    total = sum(parts.values())
    return {
        "seconds": total,
        "capture_seconds": capture,
        "drafter_seconds": total - capture,
        "tokens_per_second": float(plan.tokens.sum()) / total if total else 0.0,
        "padded_shapes": float(
            len(np.unique(np.stack([plan.samples_per_microbatch, plan.widths]), axis=1).T)
        ),
    }


def split_ranks(capture_seconds: float, drafter_seconds: float, num_ranks: int) -> tuple[int, int]:
    """(target ranks, drafter ranks) of `num_ranks` with the shortest epoch, both roles working at once.

    split_ranks(30.0, 10.0, 4) == (3, 1): each target rank captures for 10 s, the drafter trains for 10 s.
    """
    choices = [(t, num_ranks - t) for t in range(1, num_ranks)]
    return min(choices, key=lambda c: max(capture_seconds / c[0], drafter_seconds / c[1]))


def recommend(
    table: Mapping[str, Mapping[str, float]], knee: int, num_buckets: int, edges: Sequence[int]
) -> str:
    """One sentence: the strategy to use, and why."""
    fastest = max(row["tokens_per_second"] for row in table.values())
    quick = [name for name, row in table.items() if row["tokens_per_second"] >= 0.95 * fastest]
    chosen = min(quick, key=lambda name: table[name]["mixing_step"])
    row, sentence = table[chosen], ""
    if chosen == "bucketed" and knee > num_buckets:
        sentence = f"; {knee} buckets instead of {len(edges) - 1} would pad less at no cost"
    return (
        f"Use {chosen}: {row['tokens_per_second'] / fastest:.0%} of the highest predicted throughput at a "
        f"mixing of "
        f"{row['mixing_step']:.2f} (1 = random samples) and a padding efficiency of "
        f"{row['padding_efficiency']:.3f}{sentence}."
    )
