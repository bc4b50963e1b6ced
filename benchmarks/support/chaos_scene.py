"""A command of the pipeline that is struck by a fault: its files, processes and output."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.chaos_results import family, role_of
from benchmarks.support.flow_runs import ROOT, SMALL_SETTINGS, flow_command, flow_environment, write_rows
from benchmarks.support.tiny_target import make_tiny_target
from dflash_core.launch.stop_signal import STOP_SECONDS

# Seconds of an undisturbed run on an idle machine with two cores, and where nothing is known of the machine.
IDLE_SECONDS, UNKNOWN_SECONDS = 45.0, 360.0
SHIFTED_CLOCK = ROOT / "benchmarks" / "support" / "shifted_clock"

SETTINGS: dict[str, Any] = {
    **SMALL_SETTINGS,
    "batching": {**SMALL_SETTINGS["batching"], "tokens_per_step": 256},
    "training": {
        **SMALL_SETTINGS["training"],
        "topology": "split",
        "epochs": 2,
        "compute_dtype": "float32",
        "validate_every": 10,
        "checkpoint_every_steps": 5,
    },
    "tracking": {"system_metrics": False},
}


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str
    errors: str

    def answer(self) -> list[str]:
        """Return the messages with which the command reports its failure."""
        return [ln for ln in self.errors.splitlines() if ln.startswith(("error: ", "stopped; "))]

    def complaint(self) -> str | None:
        """Return why the answer is not one message, or None where it is one, or none is due."""
        for text in (self.output, self.errors):
            if "Traceback (most recent call last)" in text:
                return f"a traceback: {text[text.index('Traceback') :][-600:]}"
        # A process that was killed cannot answer.
        due = 0 if self.code == 0 else 1
        if self.code != -signal.SIGKILL and len(self.answer()) != due:
            return f"exit code {self.code} with {len(self.answer())} messages: {self.errors[-800:]}"
        return None


@dataclass
class Scene:
    """A directory with target, data and storage root, and the command that runs the pipeline in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    process: subprocess.Popen[bytes] | None = None
    # Of an undisturbed run on this machine, under its present load.
    seconds: float = UNKNOWN_SECONDS

    @property
    def limit_seconds(self) -> float:
        """Time after which a command, or a run through a server, counts as hanging."""
        return max(600.0, 10.0 * self.seconds)

    @property
    def orphan_seconds(self) -> float:
        """Time for which processes may outlive a command: a rank has 15 s from SIGTERM to its end."""
        return STOP_SECONDS + 10.0 * max(1.0, self.seconds / IDLE_SECONDS)

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def make_inputs(self) -> None:
        """Write the target and two files of data."""
        make_tiny_target(self.root / "target")
        for name, num_rows, seed in (("a.jsonl", 60, 0), ("b.jsonl", 30, 1)):
            write_rows(self.root / "data" / name, num_rows, seed=seed)

    def clear(self) -> None:
        """Empty the storage root and the directory of temporary files."""
        for directory in (self.runs, self.temporary):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()

    def full_settings(self) -> dict[str, Any]:
        """Return the settings of the command, by section."""
        data = {"files": [str(self.root / "data")], "min_validation_samples": 4, "limit": None}
        target = {"name": str(self.root / "target"), "compute_dtype": "float32", "feature_dtype": "float32"}
        return SETTINGS | {"target": target, "data": data, "storage_root": str(self.runs)} | self.settings

    def start(
        self, flow: str = "train_dflash", *settings: Mapping[str, Any], name: str = "flow", **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a flow; its output goes to `<name>.out` and `<name>.err`."""
        environment = flow_environment() | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            "DFLASH_CHAOS": self.token,
            **self.environment,
            **variables,
        }
        if "DFLASH_CLOCK_SWITCH" in environment:
            environment["PYTHONPATH"] = f"{SHIFTED_CLOCK}:{environment['PYTHONPATH']}"
        given = settings or (self.full_settings(),)
        with open(self.root / f"{name}.out", "wb") as out, open(self.root / f"{name}.err", "wb") as err:
            return subprocess.Popen(
                flow_command(flow, "quickstart", *given),
                cwd=self.root,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def end_of(self, process: subprocess.Popen[bytes], name: str = "flow") -> Ended:
        """Wait for a command to end.

        Raises:
            subprocess.TimeoutExpired: it hangs.
        """
        code = process.wait(self.limit_seconds)
        texts = [(self.root / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
        return Ended(code, *texts)

    def of(self, role: str) -> list[psutil.Process]:
        """Return the living processes of a role; `all`: every one."""
        found = []
        for process in family(self.token):
            with contextlib.suppress(psutil.Error):
                if role == "all" or role_of(process) == role:
                    found.append(process)
        return found

    def orphans(self) -> list[str]:
        """Return the processes that outlive the command by `orphan_seconds`, and end them."""
        deadline = time.monotonic() + self.orphan_seconds
        while (left := family(self.token)) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                words = f"{role_of(process)} ({process.status()}, parent {process.ppid()})"
                lines.append(f"orphan {process.pid}: {words}: {' '.join(process.cmdline())[:160]}")
                process.kill()
        return lines

    def matches(self, patterns: Iterable[str]) -> Iterator[Path]:
        for pattern in patterns:
            with contextlib.suppress(OSError):
                yield from self.runs.glob(pattern)

    def wait_until(self, is_now: Callable[[], bool]) -> bool:
        """Return True at the moment, or False where the command ends before it."""
        assert self.process is not None
        while self.process.poll() is None:
            if is_now():
                return True
            time.sleep(0.01)
        return False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Send a signal to processes; return how many were still there."""
    sent = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, number)
            sent += 1
    return sent
