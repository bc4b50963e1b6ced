"""Logging cost: MLflow points, system metrics, Prefect's progress and lines of metrics.jsonl.

    python -m benchmarks.tracking [--seconds 60] [--param training.device=cpu]

Runs train-dflash/quickstart with hidden states captured in every step, so that a step costs what it costs at
scale, and ends it after the given seconds of training. While the ranks train, the flow's process and the
embedded server do nothing but logging: their CPU seconds per second of training bound what they can take from
the ranks on a machine without an idle core (one core's share; on n busy cores an n-th of it is likely). The
time that a rank spends on lines of metrics.jsonl is measured separately. Also prints the share of the steps
that had reached MLflow at the end. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support import command
from benchmarks.support.flow_runs import flow_command, training_steps
from dflash_core.training.metrics_file import MetricsFile


def start(root: Path, params: list[str], log: Path) -> subprocess.Popen[bytes]:
    settings = {"target.cache": "none", "training.validate_every": 100_000, "storage_root": str(root)}
    arguments = flow_command("train_dflash", "quickstart", settings)
    arguments += [part for setting in params for part in ("--param", setting)]
    with log.open("wb") as file:
        return subprocess.Popen(arguments, stdout=file, stderr=file)


def cpu_seconds(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the CPU seconds of the flow's own process and of its server, without ranks and torchrun."""
    flow = psutil.Process(process.pid)
    servers = [p for p in flow.children() if "flows.runtime.embedded_server" in p.cmdline()]
    groups = {"flow": [flow], "server": [q for p in servers for q in [p, *p.children(recursive=True)]]}
    times = {name: [p.cpu_times() for p in processes] for name, processes in groups.items()}
    return {name: sum(t.user + t.system for t in group) for name, group in times.items()}


def line_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the seconds that a rank spends on writing one line of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as directory:
        file = MetricsFile(Path(directory) / "metrics.jsonl", 0, validated_step=-1)
        started = time.perf_counter()
        for line in lines:
            file.write(line["step"], line)
        return (time.perf_counter() - started) / len(lines)


def points_in_mlflow(root: Path) -> int:
    import mlflow

    run_id = json.loads((root / "quickstart" / "latest" / "mlflow.json").read_text())["run_id"]
    client = mlflow.MlflowClient(f"sqlite:///{root}/mlflow.db")
    return len(client.get_metric_history(run_id, "train/loss"))


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of training")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root, log = Path(directory), Path(directory) / "run.log"
        run_dir = root / "quickstart" / "latest"
        process = start(root, args.param, log)
        while not training_steps(run_dir):
            if process.poll() is not None:
                sys.exit(f"ended early with code {process.returncode}:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        before, started = cpu_seconds(process), time.monotonic()
        first = len(training_steps(run_dir))
        time.sleep(args.seconds)
        steps = training_steps(run_dir)[first:]
        after, wall = cpu_seconds(process), time.monotonic() - started
        process.terminate()
        process.wait(60)
        figures = {
            "steps": len(steps),
            "step_seconds": wall / len(steps),
            **{f"{name}_cpu_share": (after[name] - before[name]) / wall for name in after},
            "metrics_line_share": line_seconds(steps) * len(steps) / wall,
            "steps_in_mlflow_share": points_in_mlflow(root) / len(training_steps(run_dir)),
        }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):28}{value:,.5f}")
    command.print_json(figures)


if __name__ == "__main__":
    main()
