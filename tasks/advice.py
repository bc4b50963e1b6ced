"""The cost model of a run before it is trained: from the target's shape, scaled to a measured run where there
is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dflash_core.batching.cost import CostModel, predict
from dflash_core.config import RunConfig

CPU_FLOPS, GPU_FLOPS = 1e11, 4e14  # sustained, where nothing was measured


def shape_model(target_directory: Path, config: RunConfig) -> CostModel:
    """Constants from the shapes of target and drafter and an assumed speed of the device."""
    shape = json.loads((target_directory / "config.json").read_text(encoding="utf-8"))
    shape = shape.get("text_config", shape)
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    on_gpu = config.training.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    if config.training.device == "cuda":
        on_gpu = True
    layers = shape["num_hidden_layers"]
    return CostModel.from_shapes(
        # labels from the target need all of its layers; else capture stops after the last one read, id n - 3
        target_layers=layers if config.objective.labels == "target" else max(1, layers - 2),
        hidden_size=hidden,
        intermediate_size=shape["intermediate_size"],
        kv_size=(shape.get("num_key_value_heads") or heads) * (shape.get("head_dim") or hidden // heads),
        vocab_size=shape["vocab_size"],
        num_captured_layers=config.drafter.num_captured_layers,
        draft_layers=config.drafter.num_layers,
        flops_per_second=GPU_FLOPS if on_gpu else CPU_FLOPS,
        seconds_per_microbatch=5e-3 if on_gpu else 2e-2,
    )


def scale_to_measured(model: CostModel, summary: Mapping[str, Any], plan: Any) -> CostModel:
    """The model with its capture and its training constants scaled to what a run spent.

    Args:
        summary: summary.json of a run with the same target and drafter, states not kept between epochs.
        plan: a `BatchPlan` of one of its epochs.
    """
    predicted, epochs = predict(plan.work, model), summary["tokens"] / max(1, int(plan.tokens.sum()))
    scales = {
        "capture": summary["capture_seconds"] / epochs / predicted.capture_seconds,
        "train": summary["drafter_seconds"] / epochs / predicted.train_seconds,
    }
    scaled = {f.name: getattr(model, f.name) * scales[f.name.split("_")[0]] for f in fields(model)}
    return replace(model, **scaled)
