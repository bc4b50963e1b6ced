"""Small complete training runs for tests and benchmarks: a shard of random samples, plans, run.json, results.

A run of the default settings takes some seconds on one core.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.tiny_target import MASK_TOKEN_ID, VOCAB_SIZE
from dflash_core.anchors import draft_slots
from dflash_core.batching.plan import build_plan
from dflash_core.batching.storage import save_plan
from dflash_core.config import RunConfig, from_dict, to_dict
from dflash_core.data.shard_writer import ShardWriter
from dflash_core.data.store import open_store

SETTINGS: dict[str, Any] = {
    "target": {"compute_dtype": "float32", "feature_dtype": "float32"},
    "data": {"validation_share": 0.1, "min_validation_samples": 4},
    "batching": {"strategy": "packed", "token_budget": 96, "tokens_per_step": 256},
    "drafter": {
        "num_layers": 1,
        "block_size": 4,
        "target_layer_ids": [0, 2],
        "mask_token_id": MASK_TOKEN_ID,
        "intermediate_size": 96,
    },
    "objective": {"num_anchors": 6},
    "optimizer": {"lr": 3e-3},
    "training": {
        "epochs": 2,
        "device": "cpu",
        "compute_dtype": "float32",
        "validate_every": 5,
        "num_validation_samples": 4,
        "checkpoint_every_steps": 4,
        "max_draft_slots": 64,
    },
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with nested changes."""
    result = dict(base)
    for name, value in changes.items():
        nested = isinstance(value, dict) and name in result
        result[name] = merged(result[name], value) if nested else value
    return result


def write_shard(directory: Path, *, num_samples: int = 60, seed: int = 0) -> Path:
    """Write random samples of 6 to 90 tokens: a prompt of a third, then an answer.

    Every tenth sample has one supervised token, its last, and no eligible anchor: no token follows it.
    """
    rng = np.random.default_rng(seed)
    with ShardWriter(directory, source_digest=f"random {seed} {num_samples}", meta={}) as writer:
        for i in range(num_samples):
            length = int(rng.integers(6, 91))
            # Every other token repeats the one before it plus one, so that there is something to learn.
            ids = rng.integers(4, VOCAB_SIZE, length).astype(np.int32)
            ids[1::2] = np.minimum(ids[0::2][: len(ids[1::2])] + 1, VOCAB_SIZE - 1)
            mask = np.zeros(length, np.uint8)
            mask[length // 3 :] = 1
            if i % 10 == 9:
                mask[:-1] = 0
            writer.add(ids, mask, source="even" if i % 2 == 0 else "odd")
        writer.close()
    return directory


def write_run(
    root: Path,
    target: Path,
    changes: dict[str, Any] | None = None,
    *,
    name: str = "run",
    num_samples: int = 60,
) -> tuple[Path, RunConfig]:
    """Write everything that `launch` needs under `root`; return the run's directory and its configuration.

    Runs of one root with the same number of samples share a shard.
    """
    config: RunConfig = from_dict(RunConfig, merged(SETTINGS, changes or {}))
    shard = root / f"shard-{num_samples}"
    if not shard.exists():
        write_shard(shard, num_samples=num_samples)
    store = open_store([shard], config.data)
    rows = store.train_indices
    slots = draft_slots(
        store.num_eligible[rows],
        num_anchors=config.objective.num_anchors,
        block_size=config.drafter.block_size,
    )
    run_dir = root / name
    run_dir.mkdir(parents=True, exist_ok=True)
    plans = []
    for epoch in range(config.training.epochs):
        path, seed = run_dir / f"epoch-{epoch:03d}.parquet", config.training.seed
        plan = build_plan(store.lengths[rows], config.batching, seed=seed, epoch=epoch, draft_slots=slots)
        save_plan(plan, path)
        plans.append(str(path))
    paths = {"target": str(target), "shards": [str(shard)], "plans": plans, "run": str(run_dir)}
    description = {"config": to_dict(config), "run_key": "test", "paths": paths, "mlflow_run_id": None}
    (run_dir / "run.json").write_text(json.dumps(description))
    return run_dir, config


def read_metrics(run_dir: Path, kind: str = "train/loss") -> dict[int, dict[str, Any]]:
    """Return the lines that hold `kind`, by step; fail on a step that occurs twice."""
    by_step: dict[int, dict[str, Any]] = {}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    for line in lines:
        if not line.endswith("\n"):  # a kill may cut the last one
            continue
        values = json.loads(line)
        if kind in values:
            assert values["step"] not in by_step, f"step {values['step']} is logged twice"
            by_step[values["step"]] = values
    return by_step


def losses(run_dir: Path) -> list[float]:
    """Return the training losses of steps 1, 2, ..., which must be complete."""
    lines = read_metrics(run_dir)
    assert list(lines) == list(range(1, len(lines) + 1)), list(lines)
    return [line["train/loss"] for line in lines.values()]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the exported drafter."""
    from safetensors.numpy import load_file

    return load_file(run_dir / "drafter" / "model.safetensors")


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Return the living processes, zombies excepted, whose command line names this run."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(run_dir / "run.json") in process.cmdline():
                processes.append(process)
    return processes


def assert_nothing_left(run_dir: Path, seconds: float = 60.0) -> None:
    """Fail if a process of the run is still alive after `seconds`."""
    end = time.monotonic() + seconds
    while left := processes_of(run_dir):
        assert time.monotonic() < end, f"left: {[(p.pid, p.cmdline()) for p in left]}"
        time.sleep(0.05)
