"""Kills at random moments, and a run that ends as if nothing had happened.

    python benchmarks/soak.py                  # 30 kills of a split run of 1 target and 1 drafter rank
    python benchmarks/soak.py --kills 5 --seed 3

Claim: whatever dies and when (a target rank, a drafter rank, torchrun, by SIGKILL or SIGTERM), no process is
left, the next launch goes on by itself, and losses and exported weights equal those of an undisturbed run bit
for bit. Moments are drawn over the whole life of a launch: imports, loading, steps, saving. Prints a table,
then one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil  # noqa: E402

from dflash_core.training.launcher import TrainingFailed, launch  # noqa: E402
from dflash_core.training.supervise import read_records  # noqa: E402
from tests.tiny_target import make_tiny_target  # noqa: E402
from tests.training_run import assert_nothing_left, losses, weights, write_run  # noqa: E402

SETTINGS = {
    "training": {
        "topology": "split",
        "epochs": 4,
        "validate_every": 10,
        "checkpoint_every_steps": 3,
        "num_validation_samples": 2,
    }
}


def strike(run_dir: Path, seconds: float, victim: str, number: signal.Signals, done: threading.Event) -> None:
    """After `seconds`, kill what is there of the victim; of a launch that has no ranks yet, torchrun."""
    if done.wait(seconds):
        return
    torchrun = [
        p
        for p in psutil.process_iter()
        if "dflash_core.training.launcher" in _command(p) and str(run_dir / "run.json") in _command(p)
    ]
    ranks = [r for r in read_records(run_dir) if r["role"] == victim and psutil.pid_exists(r["pid"])]
    for pid in [r["pid"] for r in ranks] or [p.pid for p in torchrun]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        target = make_tiny_target(root / "target")
        whole, config = write_run(root, target, SETTINGS, name="whole")
        started = time.monotonic()
        launch(whole, config)
        undisturbed_seconds = time.monotonic() - started
        run_dir, config = write_run(root, target, SETTINGS, name="struck")
        kills = launches = 0
        print(f"{'launch':>6}  {'victim':<10}{'signal':<10}{'after s':>8}  how the launch ended")
        while not (run_dir / "summary.json").exists():
            launches += 1
            done = threading.Event()
            plan = (
                rng.uniform(0.2, 1.0) * undisturbed_seconds,
                rng.choice(["target", "drafter", "torchrun"]),
                rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]),
            )
            if kills < arguments.kills:
                threading.Thread(target=strike, args=(run_dir, *plan, done), daemon=True).start()
            try:
                launch(run_dir, config)
                ended = "finished"
            except TrainingFailed as failure:
                ended = str(failure)
                kills += 1
            done.set()
            assert_nothing_left(run_dir)
            print(f"{launches:>6}  {plan[1]:<10}{plan[2].name:<10}{plan[0]:>8.1f}  {ended[:110]}", flush=True)
            if (
                ended == "finished" and kills < arguments.kills
            ):  # too fast for this strike: once more from the start
                same = losses(run_dir) == losses(whole)
                assert same, "a finished run differs"
                run_dir, config = write_run(root, target, SETTINGS, name=f"struck-{launches}")
        ours, theirs = weights(run_dir), weights(whole)
        identical = losses(run_dir) == losses(whole) and all(
            np.array_equal(ours[n], theirs[n]) for n in theirs
        )
        print(f"{kills} kills in {launches} launches; losses and weights identical: {identical}")
        print(json.dumps({"kills": kills, "launches": launches, "identical": identical}))
        sys.exit(0 if identical else 1)


if __name__ == "__main__":
    main()
