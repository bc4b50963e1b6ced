"""Small settings and data, and the commands, for tests and benchmarks that run whole flows."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SMALL_SETTINGS: dict[str, Any] = {
    "batching": {"strategy": "packed", "token_budget": 512, "tokens_per_step": 512, "num_buckets": 4},
    "drafter": {"num_layers": 1, "block_size": 4, "target_layer_ids": [1, 2], "mask_token_id": 3},
    "objective": {"num_anchors": 8},
    "training": {"epochs": 1, "device": "cpu", "num_validation_samples": 4, "validate_every": 1000},
    "evaluation": {"num_prompts": 2, "max_new_tokens": 8},
}


def write_rows(path: Path, num_rows: int, *, seed: int) -> None:
    """Write a JSONL file of conversations of very different lengths."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for i in range(num_rows):
            num_functions = rng.choice([1, 2, 6])
            body = "\n".join(
                f"def area_{j}(a): return a * {rng.randint(0, 99)}" for j in range(num_functions)
            )
            messages = [
                {"role": "user", "content": f"Write function {i} of {seed}"},
                {"role": "assistant", "content": body},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def flow_command(flow: str, name: str, *settings: Mapping[str, Any]) -> list[str]:
    """Return the command `python -m flows.<flow> <name>` with every setting as --param KEY=JSON.

    Where several mappings name the same key, a later one changes single keys of an earlier one.
    """
    given = [f"{key}={json.dumps(value)}" for mapping in settings for key, value in mapping.items()]
    return [sys.executable, "-m", f"flows.{flow}", name, *(p for text in given for p in ("--param", text))]


def without_servers() -> dict[str, str]:
    """Return this process's environment without any setting of Prefect or MLflow."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW"))}


def flow_environment() -> dict[str, str]:
    """Return `without_servers()` with this project importable from any working directory."""
    return without_servers() | {"PYTHONPATH": str(ROOT)}


def run_small_flow(flow: str, directory: Path, *settings: Mapping[str, Any]) -> tuple[float, str]:
    """Run a flow with `SMALL_SETTINGS` in a directory that holds a model `target` and files in `data`.

    Returns:
        Seconds and standard error of the command. Where it fails, this process ends.
    """
    data = {"files": ["data"], "min_validation_samples": 4, "limit": None}
    given = ({**SMALL_SETTINGS, "target": {"name": str(directory / "target")}, "data": data}, *settings)
    command = flow_command(flow, "quickstart", *given)
    started = time.perf_counter()
    done = subprocess.run(command, cwd=directory, env=flow_environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return seconds, done.stderr


def training_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl that training steps have written so far."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "perf/step_seconds" in line]
