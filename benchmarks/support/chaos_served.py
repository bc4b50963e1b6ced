"""Rounds of benchmarks/chaos.py through a real Prefect server and worker."""

from __future__ import annotations

import contextlib
import random
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.support.chaos_faults import MOMENTS
from benchmarks.support.chaos_results import OF_THE_WORKER, ROLES, family
from benchmarks.support.chaos_scene import Scene, send
from benchmarks.support.prefect_services import FINAL_STATES, PrefectServices, kill_group

MAX_RUNS = 5


class Served:
    """A server and a worker that outlive the rounds, and are started again where a fault ended them."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.scene = Scene(root, seconds=seconds)
        path = root / "services"
        # Those of an earlier session in this directory have their pools.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        self.services = PrefectServices(path, root / "target")
        allowed = shlex.split(self.services.environment.get("DFLASH_ALLOWED", ""))
        self.services.environment |= {
            "DFLASH_CHAOS": self.scene.token,
            "DFLASH_ALLOWED": shlex.join([*allowed, str(root)]),
            "TMPDIR": str(self.scene.temporary),
        }

    def __enter__(self) -> Served:
        self.scene.temporary.mkdir(exist_ok=True)
        self.services.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.services.__exit__()
        send(family(self.scene.token), signal.SIGKILL)

    def of(self, role: str) -> list[psutil.Process]:
        """Return the living processes of a role.

        Roles are `worker`, `server`, `flow` (the process of a run without its ranks), `run` (with them) and
        `all` (with the worker as well).
        """
        if role in ("worker", "server"):
            process = self.services.worker if role == "worker" else self.services.server
            return [psutil.Process(process.pid)] if process and process.poll() is None else []
        servers = {p.pid for p in self.of("worker")}
        for server in self.of("server"):
            servers |= {server.pid, *(p.pid for p in server.children(recursive=True))}
        run = [p for p in family(self.scene.token) if p.pid not in servers]
        if role == "flow":
            return [p for p in run if not _is_training(p)]
        return run + self.of("worker") if role == "all" else run

    def revive(self) -> None:
        """Start the server and the worker where they have ended."""
        if not self.of("server"):
            kill_group(self.services.server)
            self.services.start_server()
        if not self.of("worker"):
            self.services.start_worker()

    def request(self) -> str:
        return self.services.run(**self.scene.full_settings())

    def is_over(self, flow_run: str) -> bool:
        with contextlib.suppress(OSError):
            return self.services.state(flow_run) in FINAL_STATES
        return False

    def wait(self, flow_run: str, is_now: Callable[[], bool]) -> bool:
        """Return True at a moment of the run, or False where it ends before; raises TimeoutError."""
        limit, looked = self.scene.limit_seconds, 0.0
        deadline = time.monotonic() + limit
        while not is_now():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run is {self.services.state(flow_run)} after {limit:.0f} s")
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                if self.is_over(flow_run):
                    return False
            time.sleep(0.02)
        return True

    def complaint(self, flow_run: str) -> str | None:
        """Return why the state of a run that has ended is not one message, or None."""
        state = self.services.inspect(flow_run)["state"]
        message = (state["message"] or "").strip()
        is_one = message and "\n" not in message and "Traceback" not in message
        return None if is_one or state["type"] == "COMPLETED" else f"{state['type']} with {message!r}"

    def workspaces(self) -> list[str]:
        """Return the directories of Prefect's worker in TMPDIR that outlive a run by `orphan_seconds`."""
        deadline = time.monotonic() + self.scene.orphan_seconds
        while (left := [*self.scene.temporary.glob(f"{OF_THE_WORKER}*")]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"temporary left in TMPDIR: {path.name}" for path in left]

    def orphans(self) -> list[str]:
        """Return the processes of a run that outlive it, and end them."""
        deadline = time.monotonic() + self.scene.orphan_seconds
        while (left := self.of("run")) and time.monotonic() < deadline:
            time.sleep(0.2)
        lines = [f"orphan {p.pid}: {' '.join(p.cmdline())[:160]}" for p in left]
        send(left, signal.SIGKILL)
        return lines


def _is_training(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(ROLES[role] in process.cmdline() for role in ("launcher", "rank"))
    return True


def _kill(role: str) -> Callable[[Served, str, random.Random], str]:
    def strike(served: Served, flow_run: str, rng: random.Random) -> str:
        num_sent = send(served.of(role), signal.SIGKILL)
        time.sleep(rng.uniform(0.0, 10.0))
        return f"SIGKILL to {num_sent} of {role}" if num_sent else ""

    return strike


def _pause(role: str) -> Callable[[Served, str, random.Random], str]:
    def strike(served: Served, flow_run: str, rng: random.Random) -> str:
        seconds, victims = rng.uniform(1.0, 15.0), served.of(role)
        num_sent = send(victims, signal.SIGSTOP)
        time.sleep(seconds)
        send(victims, signal.SIGCONT)
        return f"{num_sent} of {role} stopped for {seconds:.1f} s" if num_sent else ""

    return strike


def _cancel(served: Served, flow_run: str, rng: random.Random) -> str:
    served.services.prefect("flow-run", "cancel", flow_run)
    return "cancelled"


SERVED: dict[str, Callable[[Served, str, random.Random], str]] = {
    "served-kill-flow": _kill("flow"),
    "served-kill-worker": _kill("worker"),
    "served-kill-server": _kill("server"),
    "served-power-loss": _kill("all"),
    "served-pause-worker": _pause("worker"),
    "served-pause-server": _pause("server"),
    "served-cancel": _cancel,
}


def served_round(served: Served, name: str, rng: random.Random, story: list[str], defects: list[str]) -> int:
    """Request a run under a fault, and again until one has completed; return how often it struck."""
    struck = 0
    served.revive()
    served.scene.clear()
    for i in range(MAX_RUNS):
        flow_run = served.request()
        if i == 0:
            when, is_now = _moment(served, rng)
            if served.wait(flow_run, is_now):
                what = SERVED[name](served, flow_run, rng)
                story.append(f"{what or 'nothing to strike'} at {when}")
                struck = int(bool(what))
            served.revive()
        served.wait(flow_run, lambda: False)
        state = served.services.state(flow_run)
        story.append(state)
        defects += served.orphans()
        if complaint := served.complaint(flow_run):
            defects.append(complaint)
        if state == "COMPLETED":
            # A worker that is killed cannot remove its own.
            if name not in ("served-kill-worker", "served-power-loss"):
                defects += served.workspaces()
            return struck
    defects.append(f"no run of {MAX_RUNS} has completed")
    return struck


def _moment(served: Served, rng: random.Random) -> tuple[str, Callable[[], bool]]:
    """Return a random moment of a run, in words and as a condition."""
    started, after = time.monotonic(), rng.uniform(0.0, 1.5 * served.scene.seconds)
    when = rng.choice([*MOMENTS, ""])
    if not when:
        return f"{after:.1f} s", lambda: time.monotonic() - started > after
    return when, lambda: any(True for _ in served.scene.matches(MOMENTS[when]))
