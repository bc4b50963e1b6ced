"""Small complete training runs for tests: a tiny target, a shard of random samples, plans, run.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
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
from dflash_core.data.store import TokenStore
from dflash_core.launch.rank_status import read_records

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
    """`base` with nested changes."""
    out = dict(base)
    for name, value in changes.items():
        out[name] = merged(out[name], value) if isinstance(value, dict) and name in out else value
    return out


def write_shard(directory: Path, *, num_samples: int = 60, seed: int = 0) -> Path:
    """Random samples of 6 to 90 tokens: a prompt of a third, then an answer; each tenth answers one token
    only.

    Such a sample has no eligible anchor: the token after its only supervised one is missing.
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
    """Everything that `launch` needs under `root`; returns the run's directory and its configuration.

    Runs of one root and the same data and batching settings share shard and plans.
    """
    config: RunConfig = from_dict(RunConfig, merged(SETTINGS, changes or {}))
    shard = root / f"shard-{num_samples}"
    if not shard.exists():
        write_shard(shard, num_samples=num_samples)
    store = TokenStore.open(
        [shard],
        validation_share=config.data.validation_share,
        min_validation_samples=config.data.min_validation_samples,
    )
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
        path = run_dir / f"epoch-{epoch:03d}.parquet"
        seed = config.training.seed
        save_plan(
            build_plan(store.lengths[rows], config.batching, seed=seed, epoch=epoch, draft_slots=slots), path
        )
        plans.append(str(path))
    paths = {"target": str(target), "shards": [str(shard)], "plans": plans, "run": str(run_dir)}
    description = {"config": to_dict(config), "run_key": "test", "paths": paths, "mlflow_run_id": None}
    (run_dir / "run.json").write_text(json.dumps(description))
    return run_dir, config


def read_metrics(run_dir: Path, kind: str = "train/loss") -> dict[int, dict[str, Any]]:
    """Lines that hold `kind`, by step; fails on a step that is there twice."""
    out: dict[int, dict[str, Any]] = {}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    for values in map(
        json.loads, (line for line in lines if line.endswith("\n"))
    ):  # a kill may cut the last one
        if kind in values:
            assert values["step"] not in out, f"step {values['step']} is logged twice"
            out[values["step"]] = values
    return out


def last_step(run_dir: Path) -> int:
    """The last step that is logged, 0 before the first."""
    return max(read_metrics(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def newest(run_dir: Path) -> int:
    """Step of the newest checkpoint."""
    return max(int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step-????????"))


def losses(run_dir: Path) -> list[float]:
    """Training losses in order of steps 1, 2, ..., which must be complete."""
    lines = read_metrics(run_dir)
    assert list(lines) == list(range(1, len(lines) + 1)), list(lines)
    return [line["train/loss"] for line in lines.values()]


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    """Tensors of the exported drafter."""
    from safetensors.numpy import load_file

    return load_file(run_dir / "drafter" / "model.safetensors")


def with_training(run_dir: Path, config: RunConfig, **changes: Any) -> RunConfig:
    """The configuration with other settings in its `training` section, written to run.json as well."""
    changed = dataclasses.replace(config, training=dataclasses.replace(config.training, **changes))
    description = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(description | {"config": to_dict(changed)}))
    return changed


def when_step(
    run_dir: Path, step: int, action: Callable[[], None], seconds: float = 900.0
) -> threading.Thread:
    """A started thread that calls `action` once `metrics.jsonl` holds that step."""

    def wait() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            path = run_dir / "metrics.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            if any(line.endswith("\n") and json.loads(line)["step"] >= step for line in lines):
                action()
                return
            time.sleep(0.005)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def signal_rank(run_dir: Path, rank: int, number: int) -> None:
    """Send a signal to one rank of a run."""
    os.kill(read_records(run_dir)[rank]["pid"], number)


def launcher_pid(run_dir: Path) -> int:
    """The torchrun process of a run on this machine: the parent of its ranks."""
    return psutil.Process(read_records(run_dir)[0]["pid"]).ppid()


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Living processes, zombies excepted, whose command line names this run."""
    out = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(run_dir / "run.json") in process.cmdline():
                out.append(process)
    return out


def assert_nothing_left(run_dir: Path, seconds: float = 60.0) -> None:
    """No process of the run is alive after at most `seconds`."""
    end = time.monotonic() + seconds
    while left := processes_of(run_dir):
        assert time.monotonic() < end, f"left: {[(p.pid, p.cmdline()) for p in left]}"
        time.sleep(0.05)
