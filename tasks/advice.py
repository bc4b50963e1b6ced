"""Cost model of a run before it is trained: measured on this machine, or derived from shapes alone."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_core.batching.cost import CostModel
from dflash_core.config import RunConfig, from_dict, to_dict
from dflash_core.files import write_json
from dflash_core.target.shape import read_shape
from tasks.storage.stages import stage
from tasks.target import uses_gpu

# sustained speeds that are assumed where nothing was measured, per second
CPU_FLOPS, GPU_FLOPS = 1e11, 4e14


def shape_model(target_directory: Path, config: RunConfig) -> CostModel:
    """Derive the constants from the shapes of target and drafter and an assumed speed of the device."""
    values = json.loads((target_directory / "config.json").read_text(encoding="utf-8"))
    shape = read_shape(SimpleNamespace(**values.get("text_config", values)))
    on_gpu = uses_gpu(config.training.device)
    layers = shape.num_layers
    return CostModel.from_shapes(
        # labels from the target need all of its layers; else capture stops after the last one read, id n - 3
        target_layers=layers if config.objective.labels == "target" else max(1, layers - 2),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        kv_size=shape.num_kv_heads * shape.head_dim,
        vocab_size=shape.vocab_size,
        num_captured_layers=config.drafter.num_captured_layers,
        draft_layers=config.drafter.num_layers,
        label_share=0.6 if config.objective.labels == "target" else 0.0,
        flops_per_second=GPU_FLOPS if on_gpu else CPU_FLOPS,
        seconds_per_microbatch=5e-3 if on_gpu else 2e-2,
    )


def machine() -> str:
    """Return the name of this machine, to which measured seconds belong."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{platform.node()}, {os.cpu_count()} cores" + "".join(f", {name}" for name in gpus)


# Faster code of the measured parts is not another version: `refresh` measures again.
@stage(
    "calibrate",
    version=1,
    sources=("dflash_core.batching.cost",),
    key_only=("machine", "target_fingerprint", "dataset_digest"),
    locations=("where",),
    libraries=("torch", "transformers"),
)
def calibrate(out: Path, *, settings: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """Write calibration.json: measured seconds of a few microbatches, and the constants of the cost model."""
    from transformers.utils.logging import disable_progress_bar

    from dflash_core.training.calibrate import Meter, fit_cost_model
    from dflash_core.training.run import RunSpec

    disable_progress_bar()
    run = RunSpec(
        directory=out,
        config=from_dict(RunConfig, {**where["config"], **settings}),
        run_key="",
        target=Path(where["target"]),
        shards=tuple(map(Path, where["shards"])),
        plans=(),
        cache=out,
        total_steps=None,
        mlflow_run_id=None,
    )
    calibration, _ = fit_cost_model(Meter(run), on_progress=_show_progress)
    constants = asdict(calibration.model)
    measured = {
        "capture_seconds": calibration.capture_seconds.tolist(),
        "train_seconds": calibration.train_seconds.tolist(),
        "fitted_seconds": calibration.fitted_seconds.tolist(),
    }
    write_json(out / "calibration.json", {"constants": constants, **measured})
    return {"constants": constants, "num_microbatches": len(calibration.capture_seconds)}


def calibration_inputs(
    config: RunConfig, *, target_fingerprint: str, dataset_digest: str, target: Path, shards: list[str]
) -> dict[str, Any]:
    """Return the inputs of the stage: everything that decides the seconds of a microbatch."""
    settings = to_dict(config)
    training = {name: settings["training"][name] for name in ("device", "compute_dtype", "max_draft_slots")}
    return {
        "machine": machine(),
        "target_fingerprint": target_fingerprint,
        "dataset_digest": dataset_digest,
        "settings": {
            "target": settings["target"],
            "drafter": settings["drafter"],
            "objective": settings["objective"],
            "batching": {"token_budget": config.batching.token_budget},
            "training": training,
        },
        "where": {"config": {"data": settings["data"]}, "target": str(target), "shards": shards},
    }


def _show_progress(done: int, total: int) -> None:
    if done in (1, total) or done % 4 == 0:
        print(f"calibration: {done}/{total} microbatches measured", flush=True)
