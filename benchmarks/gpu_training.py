"""Training on one GPU: tokens/s, cost and overlap of capture and drafter, and a resume after kill -9.

    python -m benchmarks.gpu_training             # three minutes of SmolLM2 on this machine's GPU, or its CPU
    python -m benchmarks.gpu_training --seconds 60 --param training.device=cpu

Runs train-dflash/smollm2 (colocated, states captured anew at every step) as a command, kills its process
group half-way, starts it again, and stops it when the time is over. Fails when a step is missing or appears
twice, or when no step came after the kill. Overlap = (capture + drafter seconds, measured on the device) /
step seconds: about 1 means one after the other, as on a CPU (0.98 on two cores); towards 2, each hides the
other. Not run on a GPU by this project so far.

Prints a table, then one line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.support.flow_runs import flow_command, training_steps

START_SECONDS = 600.0


def start(root: Path, params: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the flow in its own process group, with its output appended to `log`."""
    settings = {
        "target.cache": "none",
        "training.checkpoint_every_seconds": 5,
        "training.validate_every": 100_000,
        "training.num_validation_samples": 8,
        "storage_root": str(root),
    }
    command = flow_command("train_dflash", "smollm2", settings)
    command += [part for setting in params for part in ("--param", setting)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def wait(process: subprocess.Popen[bytes], seconds: float, log: Path) -> None:
    """Wait `seconds`; exit with the end of the log if the process ends earlier."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"ended early with code {process.returncode}:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


def wait_until(is_training: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until training has begun, at most START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while not is_training() and time.monotonic() < deadline:
        wait(process, 1, log)


def train(root: Path, params: list[str], seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Train with a kill half-way; return all steps' metrics and the last step before the kill."""
    log, run_dir = root / "run.log", root / "smollm2" / "latest"
    process = start(root, params, log)
    wait_until(lambda: bool(training_steps(run_dir)), process, log)
    wait(process, seconds / 2, log)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed_at = training_steps(run_dir)[-1]["step"]
    process = start(root, params, log)
    wait_until(lambda: "resuming from" in log.read_text(), process, log)
    wait(process, seconds / 2, log)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    return training_steps(run_dir), killed_at


def figures(steps: list[dict[str, Any]], killed_at: int) -> dict[str, float]:
    """Check that no step is missing or repeated, and summarise the last three quarters of them."""
    numbers = [line["step"] for line in steps]
    if numbers != list(range(1, len(numbers) + 1)):
        sys.exit(f"steps are missing or repeated after the resume: {numbers}")
    if numbers[-1] <= killed_at:
        sys.exit(f"no step after the kill at {killed_at}")
    late = steps[len(steps) // 4 :]
    tokens, step, capture, drafter = (
        sum(line[name] for line in late)
        for name in ("batch/tokens", "perf/step_seconds", "perf/capture_seconds", "perf/drafter_seconds")
    )
    return {
        "steps": len(steps),
        "killed_at_step": killed_at,
        "tokens_per_second": tokens / step,
        "capture_tokens_per_second": tokens / capture,
        "drafter_tokens_per_second": tokens / drafter,
        "overlap": (capture + drafter) / step,
        "loss_first": steps[0]["train/loss"],
        "loss_last": steps[-1]["train/loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="training time, both parts together")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = figures(*train(Path(directory), args.param, args.seconds))
    for name, value in result.items():
        print(f"{name.replace('_', ' '):28}{value:,.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
