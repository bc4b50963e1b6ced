"""Three minutes of real training on one GPU: tokens/s, what capture and drafter cost and how far they overlap, and a
resume after kill -9.

    python -m benchmarks.gpu_training                     # SmolLM2 on this machine's GPU, or its CPU
    python -m benchmarks.gpu_training --seconds 60 --param training.device=cpu

Runs train-dflash/smollm2 (colocated) as a command with states captured anew at every step, kills its process group
half-way, starts it again, and stops it when the time is over; it fails where a step is missing or there twice, or
none came after the kill. Overlap = (capture + drafter seconds, as the device counts them) / step seconds: about 1
means one after the other, as on a CPU, towards 2 that each hides the other. *Not run on a GPU by this project
so far.* On two CPU cores overlap is 0.98.
Prints a table, then one line of JSON.
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
from pathlib import Path

from tests.integration.flow_runs import flow_command, training_steps


def start(root: Path, params: list[str], log: Path) -> subprocess.Popen[bytes]:
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
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if process.poll() is not None:
            sys.exit(f"ended early with code {process.returncode}:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="of training, both parts together")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root, log = Path(directory), Path(directory) / "run.log"
        run_dir = root / "smollm2" / "latest"
        process = start(root, args.param, log)
        give_up = time.monotonic() + 600
        while not training_steps(run_dir) and time.monotonic() < give_up:
            wait(process, 1, log)
        wait(process, args.seconds / 2, log)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed_at = training_steps(run_dir)[-1]["step"]
        process = start(root, args.param, log)
        give_up = time.monotonic() + 600
        while "resuming from" not in log.read_text() and time.monotonic() < give_up:
            wait(process, 1, log)
        wait(process, args.seconds / 2, log)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        steps = training_steps(run_dir)
        numbers = [line["step"] for line in steps]
        if numbers != list(range(1, len(numbers) + 1)):
            sys.exit(f"steps are missing or double after the resume: {numbers}")
        if numbers[-1] <= killed_at:
            sys.exit(f"no step after the kill at {killed_at}")
        late = steps[len(steps) // 4 :]
        total = {name: sum(line[f"perf/{name}"] for line in late) for name in ("step_seconds", "capture_seconds",
                                                                              "drafter_seconds")}  # fmt: skip
        tokens = sum(line["batch/tokens"] for line in late)
        found = {
            "steps": len(steps),
            "killed_at_step": killed_at,
            "tokens_per_second": tokens / total["step_seconds"],
            "capture_tokens_per_second": tokens / total["capture_seconds"],
            "drafter_tokens_per_second": tokens / total["drafter_seconds"],
            "overlap": (total["capture_seconds"] + total["drafter_seconds"]) / total["step_seconds"],
            "loss_first": steps[0]["train/loss"],
            "loss_last": steps[-1]["train/loss"],
        }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):28}{value:,.2f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
