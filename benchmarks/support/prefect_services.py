"""A Prefect server with pools, deployments and a worker, started on loopback in one directory.

They are started as `make server`, `make deploy` and `make worker` start them, for tests and benchmarks of
runs that go through a server.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.flow_runs import ROOT, SMALL_SETTINGS, without_servers, write_rows
from dflash_core.telemetry import NO_TELEMETRY

FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def kill_group(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a process that leads a session, and everything it started."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(done: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    """Return once `done()` is true; fail with `explain()` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.5)


def wait_until_healthy(url: str, seconds: float = 900.0) -> None:
    """Return once a server answers at `url`/health."""

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        return False

    wait_until(answers, seconds, lambda: f"no answer at {url}")


def start_module(
    command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.Popen[bytes]:
    """Start `python -m COMMAND` in its own session and append its output to a log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class PrefectServices:
    """A server with its database, a worker of `dflash-train`, and the `prefect` command.

    Args:
        path: holds logs, data of one file, and the storage root `runs` with the server's database.
        target: directory of a model.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        self.runs = path / "runs"
        write_rows(path / "a.jsonl", 300, seed=0)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        # Not started here; runs may record there.
        self.mlflow_uri = f"http://127.0.0.1:{free_port()}"
        self.environment = without_servers() | {
            "PREFECT_HOME": str(self.runs / "prefect"),
            "PREFECT_API_URL": self.url,
            # What requests may name, besides the project's directory.
            "DFLASH_ALLOWED": shlex.join([str(path), str(target), self.mlflow_uri]),
            **NO_TELEMETRY,
            "OMP_NUM_THREADS": "1",
        }
        self.worker: subprocess.Popen[bytes] | None = None
        self.server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrefectServices:
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
            self.worker.wait(300)
        kill_group(self.server)

    def start(self, log_name: str, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start `python -m COMMAND` in its own session and append its output to a log."""
        return start_module(command, self.path / log_name, self.environment | variables)

    def start_server(self) -> None:
        """Return once it answers; it keeps its port, database and password after an outage."""
        command = ("flows.runtime.server", "--port", self.port, "--storage-root", str(self.runs))
        self.server = self.start("server.log", *command)
        wait_until_healthy(self.url)
        auth = (self.runs / "prefect" / "auth-string").read_text().strip()
        self.environment["PREFECT_API_AUTH_STRING"] = auth

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `prefect` command; raises CalledProcessError where it fails."""
        return self._run("prefect", "--no-prompt", *arguments)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", *command]
        return subprocess.run(
            arguments, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=900, check=True
        )

    def start_worker(self) -> None:
        """Mark crashed runs, then start a worker, as `make worker` does."""
        self._run("flows.runtime.crashed_runs")
        self.worker = self.start("worker.log", "prefect", "worker", "start", "--pool", "dflash-train")

    def worker_log(self) -> str:
        return (self.path / "worker.log").read_text()

    def run(self, **sections: Any) -> str:
        """Request a run of train-dflash/quickstart and return its id."""
        settings = {
            **SMALL_SETTINGS,
            "storage_root": str(self.runs),
            "target": {"name": str(self.target)},
            "data": {"files": [str(self.path / "a.jsonl")], "min_validation_samples": 4, "limit": None},
            "tracking": {"system_metrics": False},
            **sections,
        }
        given = [f"--param={name}={json.dumps(value)}" for name, value in settings.items()]
        done = self.prefect("deployment", "run", "train-dflash/quickstart", *given)
        flow_run_id = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)
        assert flow_run_id, done.stdout
        return flow_run_id.group()

    def inspect(self, flow_run: str) -> dict[str, Any]:
        """Return the server's record of a run: `state`, `start_time`, `total_run_time` and more."""
        auth = base64.b64encode(self.environment["PREFECT_API_AUTH_STRING"].encode()).decode()
        headers = {"Authorization": f"Basic {auth}"}
        request = urllib.request.Request(f"{self.url}/flow_runs/{flow_run}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    def state(self, flow_run: str) -> str:
        return str(self.inspect(flow_run)["state"]["type"])

    def wait_for(self, flow_run: str, state: str, seconds: float = 900.0) -> None:
        """Return once a run is in a state; fail when it ends in another one."""
        wait_until(lambda: self.state(flow_run) in {state, *FINAL_STATES}, seconds, self.worker_log)
        assert self.state(flow_run) == state, self.worker_log()

    def run_directories(self) -> set[Path]:
        paths = {path.parent for path in self.runs.glob("quickstart/*/run.json")}
        return {path for path in paths if not path.is_symlink()}

    def new_run(self, known: set[Path], *, steps: int, seconds: float = 900.0) -> Path:
        """Return the run that is not among the `known` ones, once its metrics have that many steps."""

        def trained() -> list[Path]:
            new = self.run_directories() - known
            return [path for path in new if count_steps(path) >= steps]

        wait_until(trained, seconds, self.worker_log)
        [run_dir] = trained()
        return run_dir

    def training_processes(self) -> list[psutil.Process]:
        """Return the processes that name the storage root, besides the server."""
        assert self.server is not None
        return [p for p in processes_that_name(self.runs) if p.pid != self.server.pid]


def count_steps(run_dir: Path) -> int:
    """Return how many steps of a run have reached its metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("train/loss") if path.is_file() else 0


def processes_that_name(path: Path) -> list[psutil.Process]:
    """Return the processes of this machine whose command line names a path."""
    everything = psutil.process_iter(["cmdline"])
    return [p for p in everything if any(str(path) in part for part in p.info["cmdline"] or [])]
