"""A record of the stages that run, with stand-ins for training and evaluation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest


class StageRecorder:
    """Stand-ins for the functions of all stages, which note their names.

    Training and evaluation do not run: small functions write the files that the real ones leave behind.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dflash_core.launch import launcher
        from tasks import report
        from tasks.reporting import mlflow_client
        from tasks.storage.stages import STAGES

        self.ran: list[str] = []
        for stage in STAGES.values():
            function = evaluate if stage.name == "evaluate" else stage.function
            monkeypatch.setattr(stage, "function", self._recording(stage.name, function))
        monkeypatch.setattr(launcher, "launch", self.launch)
        monkeypatch.setattr(report, "draw_plots", lambda *_: None)
        for name in ("log_summary", "register_drafter"):
            monkeypatch.setattr(mlflow_client, name, lambda *_, **__: None)

    def _recording(self, name: str, function: Any) -> Any:
        def recorded(out: Path, **inputs: Any) -> dict[str, Any]:
            self.ran.append(name)
            return function(out, **inputs)

        return recorded

    def launch(self, run_dir: Path, config: Any, on_metrics: Any) -> dict[str, Any]:
        """Stand in for the launcher: metrics of every step, a drafter and a summary."""
        self.ran.append("train")
        described = json.loads((run_dir / "run.json").read_text())
        constant = dict.fromkeys(("batch/tokens", "batch/num_samples", "batch/mean_length"), 9.0)
        constant |= dict.fromkeys(("perf/step_seconds", "perf/capture_seconds", "perf/drafter_seconds"), 1.0)
        constant |= {"time_ms": int(time.time() * 1000), "validation/loss": 2.0}
        steps = range(1, described["total_steps"] + 1)
        lines = [{"step": step, "train/loss": 3.0 / step, **constant} for step in steps]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        on_metrics(lines)
        (run_dir / "drafter").mkdir(exist_ok=True)
        (run_dir / "drafter" / "config.json").write_text('{"block_size": 4, "num_hidden_layers": 1}')
        (run_dir / "drafter" / "model.safetensors").write_text(described["run_key"])
        summary = {"steps": len(lines), "updates": len(lines), "samples": 1, "tokens": 10}
        summary["tokens_per_second"] = 5.0
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    def take(self) -> list[str]:
        """Return the stages that ran since the last call, sorted."""
        ran, self.ran = sorted(self.ran), []
        return ran


def evaluate(out: Path, **inputs: Any) -> dict[str, Any]:
    """Stand in for the stage `evaluate`."""
    (out / "evaluation.json").write_text("{}")
    figures = {"acceptance_length": 1.5, "acceptance_interval": [1.2, 1.8], "prompts": 2, "lossless": True}
    return {"evaluation": {**figures, "acceptance_by_position": [0.5], "sets": {}}}
