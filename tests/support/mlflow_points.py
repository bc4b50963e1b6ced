"""Check of the points that MLflow has of a training."""

from __future__ import annotations

import json
from pathlib import Path


def check_one_point_per_step(uri: str, run_dir: Path) -> None:
    """Check that MLflow has the training loss of every step exactly once."""
    import mlflow

    steps = json.loads((run_dir / "summary.json").read_text())["steps"]
    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    points = mlflow.MlflowClient(uri).get_metric_history(run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(1, steps + 1))
