"""TODO."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends to `metrics.jsonl`. Opening it cuts what lies beyond the step from which the run goes on."""

    def __init__(self, path: Path, completed_steps: int) -> None:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A line cut short by a kill is the last one, and its step will run again.
        kept = [ln for ln in lines if ln.endswith("\n") and json.loads(ln)["step"] <= completed_steps]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(kept))
        os.replace(partial, path)
        self._file = open(path, "a")  # noqa: SIM115 (open as long as the run)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line, at once visible to readers."""
        line = {"step": step, "time_ms": int(time.time() * 1000), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
