"""The faults of benchmarks/chaos.py: what each does to the pipeline, and what it must answer."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.chaos_scene import Ended, Scene, send
from benchmarks.support.flow_runs import ROOT, without_servers, write_rows
from benchmarks.support.prefect_services import free_port, kill_group, wait_until_healthy

# Moments by name: files whose appearance marks them. Every moment is followed by a random pause.
MOMENTS = {
    "target": ["store/target/.*"],
    "ingest": ["store/ingest/.*"],
    "profile": ["store/profile/.*"],
    "edges": ["store/edges/.*"],
    "plan": ["store/plan/.*"],
    "mlflow": ["mlflow.db"],
    "launch": ["quickstart/*/run.json"],
    "ranks": ["quickstart/*/ranks/rank-0.json"],
    "steps": ["quickstart/*/metrics.jsonl"],
    "checkpoint": ["quickstart/*/checkpoints/*.tmp"],
    "export": ["quickstart/*/drafter"],
    "finished": ["quickstart/*/finished.json"],
    "evaluate": ["store/evaluate/.*"],
    "report": ["quickstart/*/plots"],
}
TRAINING = ("launch", "ranks", "steps", "checkpoint")
# Moments while something reads the data.
READING = ("target", "ingest")
TMPFS_MEGABYTES = 96


@dataclass
class Fault:
    """A fault; subclasses change what happens at the moment, before the start and after the end.

    Args:
        moments: names of `MOMENTS` at which it may strike; empty: any time of the run.
        is_survived: the command must succeed in spite of it.
        changes_inputs: a command that succeeds in spite of it has other results; the next one counts.
    """

    moments: tuple[str, ...] = ()
    is_survived: bool = False
    changes_inputs: bool = False

    def prepare(self, scene: Scene, rng: random.Random) -> None:
        """Change the scene before the first command of a round."""

    def strike(self, scene: Scene, rng: random.Random) -> str:
        """Let it happen; return a few words, or none where nothing was there to strike."""
        raise NotImplementedError

    def mend(self, scene: Scene) -> list[str]:
        """Undo it once the command has ended; return complaints."""
        return []

    def close(self, scene: Scene) -> None:
        """Undo `prepare` at the end of a round."""

    def draw_moment(self, scene: Scene, rng: random.Random) -> tuple[str, Callable[[], bool]]:
        """Return a random moment of a run, in words and as a condition."""
        started = time.monotonic()
        if not self.moments and rng.random() < 0.4:
            after = rng.uniform(0.0, scene.seconds)
            # Before the command writes its log, Python itself answers to signals.
            return (
                f"after {after:.1f} s",
                lambda: time.monotonic() - started > after and any(scene.matches(["logs/*"])),
            )
        name = rng.choice(self.moments or tuple(MOMENTS))
        pause = rng.choice([0.0, rng.uniform(0.0, 0.3), rng.uniform(0.0, 4.0)])
        seen: list[float] = []

        def is_now() -> bool:
            if not seen and any(True for _ in scene.matches(MOMENTS[name])):
                seen.append(time.monotonic())
            return bool(seen) and time.monotonic() - seen[0] >= pause

        return f"{name} + {pause:.2f} s", is_now


@dataclass
class Kill(Fault):
    """A signal to all processes of a role, or to one of them."""

    role: str = "flow"
    number: signal.Signals = signal.SIGKILL
    everyone: bool = True

    def strike(self, scene: Scene, rng: random.Random) -> str:
        victims = sorted(scene.of(self.role), key=lambda p: p.pid)
        if victims and not self.everyone:
            victims = [rng.choice(victims)]
        num_sent = send(victims, self.number)
        return f"{self.number.name} to {num_sent} of {self.role}" if num_sent else ""


@dataclass
class Pause(Fault):
    """All processes of a role are stopped for some seconds."""

    role: str = "flow"
    is_survived: bool = True

    def strike(self, scene: Scene, rng: random.Random) -> str:
        seconds, victims = rng.uniform(1.0, 12.0), scene.of(self.role)
        num_sent = send(victims, signal.SIGSTOP)
        time.sleep(seconds)
        send(victims, signal.SIGCONT)
        return f"{num_sent} of {self.role} stopped for {seconds:.1f} s" if num_sent else ""


@dataclass
class FullDisk(Fault):
    """The storage root is a small tmpfs, which is filled; where none may be mounted, files cannot grow."""

    is_mounted: bool = False

    def prepare(self, scene: Scene, rng: random.Random) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MEGABYTES}m", "none", str(scene.runs)]
        with contextlib.suppress(OSError):
            self.is_mounted = subprocess.run(command, capture_output=True).returncode == 0
        if not self.is_mounted:
            print("  no tmpfs can be mounted here: a limit on the size of files instead")

    def strike(self, scene: Scene, rng: random.Random) -> str:
        if not self.is_mounted:
            limit = rng.choice([0, 1000, 50_000])
            for process in scene.of("all"):
                with contextlib.suppress(Exception):
                    process.rlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return f"files end at {limit} bytes"
        left = rng.choice([0, 0, 4096, 100_000])
        block = 1 << 16
        with open(scene.runs / "filler", "wb", buffering=0) as filler:
            with contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(block))
            filler.truncate(max(0, filler.tell() - left))
        return f"{left} bytes free"

    def mend(self, scene: Scene) -> list[str]:
        (scene.runs / "filler").unlink(missing_ok=True)
        return []

    def close(self, scene: Scene) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(scene.runs)], check=True)


@dataclass
class Rewrite(Fault):
    """An input file is rewritten in place, with the same content or with other rows."""

    moments: tuple[str, ...] = READING
    is_same: bool = True

    def strike(self, scene: Scene, rng: random.Random) -> str:
        path = scene.root / "data" / rng.choice(["a.jsonl", "b.jsonl"])
        backup = scene.root / "original"
        shutil.copy(path, backup)
        if self.is_same:
            path.write_bytes(backup.read_bytes())
        else:
            write_rows(path, 50, seed=rng.randrange(1000))
        self.path, self.backup = path, backup
        return f"{path.name} with {'the same' if self.is_same else 'other'} rows"

    def mend(self, scene: Scene) -> list[str]:
        self.path.write_bytes(self.backup.read_bytes())
        return []


@dataclass
class Clock(Fault):
    """The clock of every process jumps back by a minute, an hour or a month; `direction` -1: ahead."""

    is_survived: bool = True
    direction: int = 1

    def prepare(self, scene: Scene, rng: random.Random) -> None:
        self.switch = scene.root / "clock-switch"
        self.switch.unlink(missing_ok=True)
        seconds = self.direction * rng.choice([60, 3600, 30 * 86400])
        scene.environment |= {"DFLASH_CLOCK_SWITCH": str(self.switch), "DFLASH_CLOCK_SHIFT": str(seconds)}

    def strike(self, scene: Scene, rng: random.Random) -> str:
        self.switch.touch()
        return f"the clock is {scene.environment['DFLASH_CLOCK_SHIFT']} s late"


@dataclass
class SecondFlow(Fault):
    """The same command starts a second time; one of the two has to succeed."""

    is_survived: bool = False
    second: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def strike(self, scene: Scene, rng: random.Random) -> str:
        self.second = [scene.start(name="second")]
        return "the same command"

    def mend(self, scene: Scene) -> list[str]:
        if not self.second:
            return []
        ended = scene.end_of(self.second.pop(), "second")
        complaint = ended.complaint()
        if complaint:
            return [f"second flow: {complaint}"]
        if ended.code and not any(word in "".join(ended.answer()) for word in ("process", "pid")):
            return [f"second flow is refused without a name: {ended.answer()}"]
        return []


@dataclass
class Prune(Fault):
    """`prune` removes what nothing refers to, two hours later by its clock."""

    is_survived: bool = True

    def strike(self, scene: Scene, rng: random.Random) -> str:
        self.process = scene.start(
            "prune",
            {"remove": True, "storage_root": str(scene.runs)},
            name="prune",
            DFLASH_CLOCK_SWITCH="/",
            DFLASH_CLOCK_SHIFT="-7200",
        )
        return "two hours ahead"

    def mend(self, scene: Scene) -> list[str]:
        ended = scene.end_of(self.process, "prune")
        complaint = ended.complaint()
        return [f"prune: {complaint}"] if complaint else []


@dataclass
class LockedDatabase(Fault):
    """Another process holds MLflow's database for some seconds."""

    moments: tuple[str, ...] = ("mlflow", *TRAINING, "finished", "evaluate", "report")

    def strike(self, scene: Scene, rng: random.Random) -> str:
        seconds = rng.choice([2.0, 10.0, 40.0])
        connection = sqlite3.connect(scene.runs / "mlflow.db", timeout=0.1, isolation_level=None)
        with contextlib.closing(connection):
            for _ in range(200):
                with contextlib.suppress(sqlite3.OperationalError):
                    connection.execute("BEGIN EXCLUSIVE")
                    break
            time.sleep(seconds)
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("ROLLBACK")
        return f"mlflow.db is locked for {seconds:.0f} s"


@dataclass
class TrackingServer(Fault):
    """MLflow is a server, which is killed, and comes back after some seconds."""

    moments: tuple[str, ...] = (*TRAINING, "finished", "evaluate", "report")

    def prepare(self, scene: Scene, rng: random.Random) -> None:
        self.port = free_port()
        self.scene_root = scene.root
        shutil.rmtree(scene.root / "tracking", ignore_errors=True)
        (scene.root / "tracking").mkdir()
        scene.settings["tracking"] = {"system_metrics": False, "uri": f"http://127.0.0.1:{self.port}"}
        self._start()

    def _start(self) -> None:
        root = self.scene_root / "tracking"
        command = [sys.executable, "-m", "flows.runtime.mlflow_server", "--port", self.port]
        command += ["--storage-root", str(root), "--workers", "1"]
        with open(self.scene_root / "tracking.log", "ab") as log:
            self.server = subprocess.Popen(
                command, cwd=ROOT, env=without_servers(), stdout=log, stderr=log, start_new_session=True
            )
        wait_until_healthy(f"http://127.0.0.1:{self.port}")

    def strike(self, scene: Scene, rng: random.Random) -> str:
        seconds = rng.uniform(0.0, 15.0)
        kill_group(self.server)
        time.sleep(seconds)
        self._start()
        return f"MLflow's server is gone for {seconds:.0f} s"

    def close(self, scene: Scene) -> None:
        kill_group(self.server)


def database_of(scene: Scene) -> Path:
    """Return the database of MLflow that a scene uses."""
    is_served = "uri" in scene.settings.get("tracking", {})
    return (scene.root / "tracking" if is_served else scene.runs) / "mlflow.db"


# Makers of faults by name.
FAULTS: dict[str, Callable[[], Fault]] = {
    "kill-flow": Kill,
    "terminate-flow": lambda: Kill(number=signal.SIGTERM),
    "interrupt-flow": lambda: Kill(number=signal.SIGINT),
    "kill-server": lambda: Kill(role="server"),
    "kill-launcher": lambda: Kill(role="launcher", moments=TRAINING),
    "terminate-launcher": lambda: Kill(role="launcher", number=signal.SIGTERM, moments=TRAINING),
    "kill-rank": lambda: Kill(role="rank", everyone=False, moments=TRAINING[1:]),
    "terminate-rank": lambda: Kill(role="rank", everyone=False, number=signal.SIGTERM, moments=TRAINING[1:]),
    "power-loss": lambda: Kill(role="all"),
    "pause-flow": Pause,
    "pause-server": lambda: Pause(role="server"),
    "pause-ranks": lambda: Pause(role="rank", moments=TRAINING[1:]),
    "pause-all": lambda: Pause(role="all"),
    "full-disk": FullDisk,
    "rewrite-same": Rewrite,
    "rewrite-other": lambda: Rewrite(is_same=False, changes_inputs=True),
    "clock-back": Clock,
    "clock-ahead": lambda: Clock(direction=-1),
    "second-flow": SecondFlow,
    "prune": Prune,
    "locked-mlflow": LockedDatabase,
    "kill-mlflow": TrackingServer,
}
