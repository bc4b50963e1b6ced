"""Watching, changing and disturbing a small run while it trains."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.tiny_run import read_metrics
from dflash_core.config import RunConfig, to_dict
from dflash_core.launch.rank_status import read_records


def last_step(run_dir: Path) -> int:
    """Return the last logged step, 0 before the first."""
    return max(read_metrics(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest checkpoint."""
    return max(int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step-????????"))


def with_training(run_dir: Path, config: RunConfig, **changes: Any) -> RunConfig:
    """Return the configuration with other `training` settings, written to run.json as well."""
    changed = dataclasses.replace(config, training=dataclasses.replace(config.training, **changes))
    description = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(description | {"config": to_dict(changed)}))
    return changed


def when_step(
    run_dir: Path, step: int, action: Callable[[], None], seconds: float = 900.0
) -> threading.Thread:
    """Start and return a thread that calls `action` once `metrics.jsonl` holds a step."""

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
    """Return the pid of the torchrun process of a run, which is the parent of its ranks."""
    return psutil.Process(read_records(run_dir)[0]["pid"]).ppid()
