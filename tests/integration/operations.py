"""A Prefect server, its pools and deployments and a worker on loopback, as `make server`, `deploy` and `worker` start
them, under one directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.integration.flow_runs import BASE, write_rows

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def end_group(process: subprocess.Popen[bytes] | None) -> None:
    """The process and all it started, at once."""
    if process is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


class Operations:
    """A server with its database, a worker of `dflash-train`, and the `prefect` command.

    Args:
        path: holds the database, logs, data of one file, and the storage root `runs`.
        target: directory of a model.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        self.runs = path / "runs"
        write_rows(path / "a.jsonl", 300, seed=0)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW"))}
        self.environment = kept | {
            "PREFECT_HOME": str(path / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "true",
            "OMP_NUM_THREADS": "1",
        }
        self.worker: subprocess.Popen[bytes] | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{self.port}/api"

    def __enter__(self) -> Operations:
        try:
            self.start_server()
            for pool in ("dflash-train", "dflash-data"):
                self.prefect("work-pool", "create", pool, "--type", "process")
            self.prefect("work-pool", "set-concurrency-limit", "dflash-train", "1")
            self.prefect("deploy", "--all")
            self.start_worker()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.worker is not None:
            self.worker.terminate()
            self.worker.wait(60)
        end_group(self.server)

    def start_server(self) -> None:
        """Returns when it answers; the same port and database after an outage."""
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        command += ["--port", self.port]
        with (self.path / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

        def answers() -> bool:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.environment['PREFECT_API_URL']}/health", timeout=5).close()
                return True
            return False

        wait_until(answers, 120)

    def prefect(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=check,
        )

    def start_worker(self) -> None:
        """As `make worker` does."""
        subprocess.run(
            [sys.executable, "-m", "flows.runtime.crashed_runs"],
            cwd=ROOT,
            env=self.environment,
            check=True,
            timeout=60,
        )
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dflash-train"]
        with (self.path / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def run(self, **sections: Any) -> str:
        """Asks for a run of train-dflash/quickstart; returns its id."""
        settings = {
            **BASE,
            "storage_root": str(self.runs),
            "target": {"name": str(self.target)},
            "data": {"files": [str(self.path / "a.jsonl")], "min_validation_samples": 4, "limit": None},
            "tracking": {"system_metrics": False},
            **sections,
        }
        given = [f"--param={name}={json.dumps(value)}" for name, value in settings.items()]
        done = self.prefect("deployment", "run", "train-dflash/quickstart", *given)
        found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)
        assert found, done.stdout
        return found.group()

    def inspect(self, flow_run: str) -> dict[str, Any]:
        """What the server knows of a run: `state`, `start_time`, `total_run_time` and more."""
        with urllib.request.urlopen(
            f"{self.environment['PREFECT_API_URL']}/flow_runs/{flow_run}", timeout=30
        ) as answer:
            return dict(json.load(answer))

    def state(self, flow_run: str) -> str:
        return str(self.inspect(flow_run)["state"]["type"])

    def wait_for(self, flow_run: str, seconds: float, *states: str) -> None:
        wait_until(
            lambda: self.state(flow_run) in states, seconds, lambda: (self.path / "worker.log").read_text()
        )

    def run_directories(self) -> set[Path]:
        return {
            path.parent for path in self.runs.glob("quickstart/*/run.json") if not path.parent.is_symlink()
        }

    def new_run(self, known: set[Path], *, steps: int, seconds: float = 240.0) -> Path:
        """The run that is not among the `known` ones, once its metrics have that many steps."""

        def trained() -> list[Path]:
            new = self.run_directories() - known
            return [
                path
                for path in new
                if (path / "metrics.jsonl").is_file()
                and (path / "metrics.jsonl").read_text().count("train/loss") >= steps
            ]

        wait_until(trained, seconds, lambda: (self.path / "worker.log").read_text())
        [found] = trained()
        return found

    def training_processes(self) -> list[psutil.Process]:
        everything = psutil.process_iter(["cmdline"])
        return [p for p in everything if any(str(self.runs) in part for part in p.info["cmdline"] or [])]


def wait_until(done: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    give_up = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < give_up, explain()
        time.sleep(0.5)
