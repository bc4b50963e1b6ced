"""Flows as a user starts them, and their metrics, for benchmarks that run whole flows."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def flow_command(flow: str, name: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command `python -m flows.<flow> <name>` with every setting as --param KEY=JSON."""
    params = [part for key, value in settings.items() for part in ("--param", f"{key}={json.dumps(value)}")]
    return [sys.executable, "-m", f"flows.{flow}", name, *params]


def training_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl that training steps have written so far."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if "perf/step_seconds" in line]
