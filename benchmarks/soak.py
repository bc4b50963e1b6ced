"""Kills at random moments: the run still ends with the losses and weights of an undisturbed one.

    python -m benchmarks.soak                  # 30 kills of a split run of 1 target and 1 drafter rank
    python -m benchmarks.soak --kills 5 --seed 3
    python -m benchmarks.soak --directory DIR --minutes 9      # pauses; the same command continues

Claim: whichever process dies and when (a target rank, a drafter rank, torchrun, by SIGKILL or SIGTERM), no
process is left, the next launch resumes by itself, and losses and exported weights equal those of an
undisturbed run bit for bit. Moments are drawn over the whole life of a launch: imports, loading, steps,
saving. Prints a table, then one line of JSON.
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
from typing import Any

import numpy as np
import psutil

from benchmarks.support.tiny_run import assert_nothing_left, losses, weights, write_run
from benchmarks.support.tiny_target import make_tiny_target
from dflash_core.launch.launcher import TrainingFailed, launch
from dflash_core.launch.rank_status import read_records

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
    """After `seconds`, kill the victim's processes; torchrun if the launch has no ranks yet."""
    if done.wait(seconds):
        return
    torchrun = [
        p
        for p in psutil.process_iter()
        if "dflash_core.launch.launcher" in _command(p) and str(run_dir / "run.json") in _command(p)
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


class Soak:
    """A run that is killed again and again; its directory holds the progress, so it can continue later."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.target = root / "target"
        self.notes = root / "soak.json"
        self.progress: dict[str, Any] = {"kills": 0, "launches": 0, "rounds": 0}
        if self.notes.exists():
            self.progress = json.loads(self.notes.read_text())
            return
        make_tiny_target(self.target)
        whole, config = write_run(root, self.target, SETTINGS, name="whole")
        started = time.monotonic()
        launch(whole, config)
        self.note(seconds=time.monotonic() - started)

    def note(self, **values: Any) -> None:
        self.progress |= values
        self.notes.write_text(json.dumps(self.progress))

    def launch(self, strikes: bool) -> str:
        """Launch once, with a kill at a random moment or without; return the way it ended."""
        rng = random.Random(f"{self.seed} {self.progress['launches']}")
        run_dir, config = write_run(self.root, self.target, SETTINGS, name=self.name)
        done = threading.Event()
        seconds = rng.uniform(0.2, 1.0) * self.progress["seconds"]
        victim = rng.choice(["target", "drafter", "torchrun"])
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        if strikes:
            threading.Thread(
                target=strike, args=(run_dir, seconds, victim, number, done), daemon=True
            ).start()
        try:
            launch(run_dir, config)
            ended = "finished"
        except TrainingFailed as failure:
            ended = str(failure)
            self.note(kills=self.progress["kills"] + 1)
        done.set()
        assert_nothing_left(run_dir)
        self.note(launches=self.progress["launches"] + 1)
        words = f"{victim:<10}{number.name:<10}{seconds:>8.1f}" if strikes else f"{'-':<10}{'-':<10}{'-':>8}"
        print(f"{self.progress['launches']:>6}  {words}  {ended[:110]}", flush=True)
        return ended

    @property
    def name(self) -> str:
        return f"killed-{self.progress['rounds']}"

    def is_identical(self) -> bool:
        """Compare losses and weights of the killed run with those of the undisturbed one."""
        killed, whole = self.root / self.name, self.root / "whole"
        ours, theirs = weights(killed), weights(whole)
        return losses(killed) == losses(whole) and all(np.array_equal(ours[n], theirs[n]) for n in theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="keep everything here, and continue an earlier soak")
    parser.add_argument("--minutes", type=float, default=1e9, help="pause after so long; needs --directory")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    pause = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.directory or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        soak = Soak(root, arguments.seed)
        print(f"{'launch':>6}  {'victim':<10}{'signal':<10}{'after s':>8}  how the launch ended")
        ended = ""
        while ended != "finished" or soak.progress["kills"] < arguments.kills:
            if time.monotonic() > pause:
                print(f"{soak.progress['kills']} kills so far; the same command continues")
                return
            if ended == "finished":  # finished before enough kills: once more from the start
                assert soak.is_identical(), "a finished run differs"
                soak.note(rounds=soak.progress["rounds"] + 1)
            ended = soak.launch(strikes=soak.progress["kills"] < arguments.kills)
        identical = soak.is_identical()
        kills, launches = soak.progress["kills"], soak.progress["launches"]
        print(f"{kills} kills in {launches} launches; losses and weights identical: {identical}")
        print(json.dumps({"kills": kills, "launches": launches, "identical": identical}))
        sys.exit(0 if identical else 1)


if __name__ == "__main__":
    main()
