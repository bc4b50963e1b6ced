"""Watching and stopping child processes, and the hook that reports a failure."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.config import RunConfig, TrainingConfig
from dflash_core.launch import launcher, rank_status
from dflash_core.launch.launcher import notify, stop
from dflash_core.launch.rank_status import RankRecord, read_records
from dflash_core.processes import start_of
from tests.support.waiting import wait_until


class SteppedClock:
    """A stand-in for the module `time` that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_end_of_a_long_run_is_not_a_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are done and torchrun is not: their end counts, not the length of the run."""
    clock, begin = SteppedClock(), SteppedClock().now
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(rank_status, "time", clock)
    monkeypatch.setattr(launcher, "START_SECONDS", 100.0)
    record = RankRecord(tmp_path, 0, "colocated")
    record.phase("train", step=9)

    class Torchrun:
        """Ends 80 s after the last rank, which trains for 80 s."""

        def poll(self) -> int | None:
            if clock.now - begin >= 80 and read_records(tmp_path)[0]["status"] == "running":
                record.end("done")
            return 0 if clock.now - begin >= 160 else None

    child: Any = Torchrun()
    launcher.watch(tmp_path, TrainingConfig(stall_seconds=100.0), child, tmp_path / "summary.json")
    assert clock.now - begin == pytest.approx(160, abs=1)


def test_a_rank_that_stays_in_a_phase_is_a_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock()
    begin = clock.now
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(rank_status, "time", clock)
    RankRecord(tmp_path, 0, "colocated").phase("train", step=9)

    class Torchrun:
        def poll(self) -> None:
            """Never end."""

    child: Any = Torchrun()
    with pytest.raises(launcher.TrainingFailed, match="stall: "):
        launcher.watch(tmp_path, TrainingConfig(stall_seconds=100.0), child, tmp_path / "summary.json")
    assert 100 < clock.now - begin < 115


@pytest.mark.parametrize("jump_seconds", [-3600.0, 3600.0])
def test_a_clock_that_is_set_is_neither_a_stall_nor_hides_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    """The clock jumps after 50 s; a rank that moved until then stays in its phase."""
    clock = SteppedClock()
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(rank_status, "time", clock)
    record = RankRecord(tmp_path, 0, "colocated")
    num_polls = 0

    class Torchrun:
        def poll(self) -> None:
            nonlocal num_polls
            num_polls += 1
            if num_polls % 40 == 0 and num_polls <= 200:
                record.phase("train", step=num_polls)
            if num_polls == 210:
                clock.now += jump_seconds

    child: Any = Torchrun()
    with pytest.raises(launcher.TrainingFailed, match="stall: "):
        launcher.watch(tmp_path, TrainingConfig(stall_seconds=100.0), child, tmp_path / "summary.json")
    assert 100 < (num_polls - 200) * launcher.POLL_SECONDS < 115


def test_the_hook_gets_run_and_message_and_a_broken_one_is_only_printed(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "message"
    notify(f'echo "$DFLASH_RUN: $DFLASH_MESSAGE" > {out}', tmp_path, "rank 1 died")
    assert out.read_text() == f"{tmp_path}: rank 1 died\n"
    notify("exit 3", tmp_path, "rank 1 died")
    assert "training.on_failure: 'exit 3' failed" in capsys.readouterr().out
    notify(None, tmp_path, "no hook")
    monkeypatch.setenv("HOOK", "exit 4 # a-secret-token")
    notify("env:HOOK", tmp_path, "rank 1 died")
    printed = capsys.readouterr().out
    assert "training.on_failure: 'env:HOOK' failed" in printed
    assert "a-secret-token" not in printed
    notify("env:NO_HOOK", tmp_path, "rank 1 died")
    assert "the environment variable 'NO_HOOK' is not set" in capsys.readouterr().out


def test_the_hook_may_be_an_address(tmp_path: Path, capsys: Any) -> None:
    got: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(204 if self.path == "/hook" else 500)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing on the console."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        notify(f"{address}/hook", tmp_path, "rank 1 died")
        assert got == [("application/json", {"run": str(tmp_path), "message": "rank 1 died"})]
        assert capsys.readouterr().out == ""
        notify(f"{address}/broken", tmp_path, "rank 1 died")
        assert "failed: HTTP Error 500" in capsys.readouterr().out
        server.shutdown()


def test_ctrl_c_while_watching_stops_torchrun_and_calls_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "start", lambda *_: child)
    monkeypatch.setattr(launcher, "watch", interrupted)
    hook_output = tmp_path / "hook"
    config = RunConfig(training=TrainingConfig(on_failure=f"touch {hook_output}"))
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(tmp_path, config)
    assert child.poll() is not None
    assert not hook_output.exists()


def test_a_launch_waits_for_ranks_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)", launcher.RANK_MODULE])
    record = {"rank": 0, "phase": "train", "pid": leftover.pid, "host": socket.gethostname()}
    record["started"] = start_of(leftover.pid)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").write_text(json.dumps(record))

    def start(*_: Any) -> None:
        assert leftover.poll() is not None
        raise InterruptedError("far enough")

    monkeypatch.setattr(launcher, "start", start)
    with pytest.raises(InterruptedError):
        launcher.launch(tmp_path, RunConfig())


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *a: None)
print(1, flush=True)
time.sleep(6000)
"""


def test_stopping_kills_a_process_that_ignores_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child starts another child that ignores TERM, in a separate session like a rank."""
    monkeypatch.setattr(launcher, "TERMINATE_SECONDS", 0.5)
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(6000)"
    )
    child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    lines = sorted(int(child.stdout.readline()) for _ in range(2))
    grandchild = lines[1]
    assert psutil.pid_exists(grandchild)
    stop(tmp_path, child)
    assert child.poll() is not None
    wait_until(lambda: not psutil.pid_exists(grandchild))
    stop(tmp_path, child)  # a second stop has nothing to do
