"""Metrics on their way out, messages about ranks that failed, commands for several nodes, and what stopping
leaves.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dflash_core.config import RunConfig, TrainingConfig
from dflash_core.errors import UserError
from dflash_core.launch import launcher, stop_signal
from dflash_core.launch.launcher import MetricsForwarder, node_commands, notify, stop, torchrun_arguments
from dflash_core.launch.rank_status import RankRecord, explain, read_records
from dflash_core.training.metrics_file import MetricsFile


def write_lines(path: Path, steps: range, **values: Any) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time_ms": 1000 + step, "train/loss": 1.0, **values}) + "\n")


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)


def test_lines_arrive_in_order_and_once(tmp_path: Path) -> None:
    got: list[int] = []
    forwarder = MetricsForwarder(tmp_path, lambda lines: got.extend(line["step"] for line in lines))
    write_lines(tmp_path, range(1, 4))
    wait_until(lambda: len(got) == 3)
    write_lines(tmp_path, range(4, 6))
    assert forwarder.finish(20) is None
    assert got == [1, 2, 3, 4, 5]


def test_a_half_written_line_waits_for_its_end(tmp_path: Path) -> None:
    got: list[int] = []
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "tra')
    forwarder = MetricsForwarder(tmp_path, lambda lines: got.extend(line["step"] for line in lines))
    wait_until(lambda: got == [1])
    with open(path, "a") as file:
        file.write('in/loss": 1.0}\n')
    assert forwarder.finish(20) is None
    assert got == [1, 2]


def test_a_tracking_server_that_is_away_loses_and_repeats_nothing(tmp_path: Path) -> None:
    got: list[int] = []
    refusals = 3

    def flaky(lines: list[dict[str, Any]]) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise ConnectionError("server is away")
        got.extend(line["step"] for line in lines)

    forwarder = MetricsForwarder(tmp_path, flaky)
    write_lines(tmp_path, range(1, 11))
    assert forwarder.finish(30) is None
    assert got == list(range(1, 11))


def test_what_never_arrives_is_named(tmp_path: Path) -> None:
    def away(lines: list[dict[str, Any]]) -> None:
        raise ConnectionError("server is away")

    forwarder = MetricsForwarder(tmp_path, away)
    write_lines(tmp_path, range(1, 3))
    problem = forwarder.finish(0.5)
    assert problem is not None and "server is away" in problem
    # The next launch sends them.
    got: list[int] = []
    assert MetricsForwarder(tmp_path, lambda ls: got.extend(x["step"] for x in ls)).finish(20) is None
    assert got == [1, 2]


def test_steps_repeated_after_a_resume_are_not_sent_again(tmp_path: Path) -> None:
    got: list[tuple[int, str]] = []

    def take(lines: list[dict[str, Any]]) -> None:
        got.extend((x["step"], "validation" if "validation/loss" in x else "train") for x in lines)

    write_lines(tmp_path, range(1, 8))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "time_ms": 1, "validation/loss": 2.0}\n')
    assert MetricsForwarder(tmp_path, take).finish(20) is None
    # Killed after step 7, resumed from the checkpoint of step 4: lines beyond it are cut, then written again.
    resumed = MetricsForwarder(tmp_path, take)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 4)
    for step in range(5, 10):
        metrics.write(step, {"train/loss": 1.0})
        if step == 5:
            metrics.write(step, {"validation/loss": 2.0})
    assert resumed.finish(20) is None
    assert [s for s, kind in got if kind == "train"] == list(range(1, 10))
    assert [s for s, kind in got if kind == "validation"] == [5]


def test_opening_metrics_cuts_beyond_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')
    MetricsFile(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_killed_rank_is_named_before_those_that_only_lost_it(tmp_path: Path) -> None:
    survivor, killed = RankRecord(tmp_path, 0, "drafter"), RankRecord(tmp_path, 1, "target")
    killed.phase("capture", step=7)
    survivor.phase("wait for target rank 1", step=7)
    survivor.report(RuntimeError("Connection closed by peer"))
    message = explain(tmp_path, 1)
    assert message.startswith("rank 1 (target, pid ")
    assert "phase 'capture' of step 7" in message


def test_a_report_names_rank_phase_and_cause(tmp_path: Path) -> None:
    record = RankRecord(tmp_path, 2, "colocated")
    record.phase("save", step=12)
    record.report(OSError("No space left on device"))
    message = explain(tmp_path, 1)
    assert "rank 2 (colocated on " in message
    assert "phase 'save' of step 12: OSError: No space left on device" in message


def test_a_cause_is_named_before_the_connections_that_it_broke(tmp_path: Path) -> None:
    RankRecord(tmp_path, 1, "target").report(RuntimeError("Connection closed by peer"))
    RankRecord(tmp_path, 0, "drafter").report(OSError("No space left on device"))
    assert "rank 0 (drafter on" in explain(tmp_path, 1)


def test_a_rank_that_was_told_to_stop_explains_the_connections_it_closed(tmp_path: Path) -> None:
    told = RankRecord(tmp_path, 0, "drafter")
    told.phase("save", step=5)
    told.end("stopped")
    RankRecord(tmp_path, 1, "target").report(RuntimeError("Connection closed by peer"))
    assert "stopped by a signal at step 5" in explain(tmp_path, 143)


def test_a_users_mistake_is_told_as_it_is(tmp_path: Path) -> None:
    RankRecord(tmp_path, 0, "colocated")  # still running when the other failed
    RankRecord(tmp_path, 1, "colocated").report(UserError("drafter.mask_token_id: not set"))
    assert explain(tmp_path, 1) == "drafter.mask_token_id: not set"


def test_no_rank_at_all(tmp_path: Path) -> None:
    assert "before any rank had started" in explain(tmp_path, 3)


def test_a_stall_names_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    """The target is a step ahead, and still it is the one that holds up the drafter."""
    drafter, target = RankRecord(tmp_path, 0, "drafter"), RankRecord(tmp_path, 1, "target")
    drafter.phase("wait for target rank 1", step=7)
    target.phase("capture", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]  # nothing here to send signals to
    assert "slowest: rank 1 (target" in launcher._describe_stall(tmp_path, records, time.time())
    drafter.phase("train", step=7)
    target.phase("wait for drafter rank 0", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    message = launcher._describe_stall(tmp_path, records, time.time())
    assert "slowest: rank 0 (drafter" in message and "phase 'train' of step 7" in message


def test_a_stall_in_a_collective_names_the_rank_that_did_not_join(tmp_path: Path) -> None:
    """Three colocated ranks: two wait for the third, which is stuck in its own work, or a step behind."""
    ranks = [RankRecord(tmp_path, rank, "colocated") for rank in range(3)]
    for rank in ranks:
        rank.phase("wait for other ranks", step=7, microbatch=1)
    ranks[2].phase("save", step=7)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    message = launcher._describe_stall(tmp_path, records, time.time())
    assert "slowest: rank 2 (colocated" in message and "phase 'save' of step 7" in message
    ranks[2].phase("wait for feed", step=7, microbatch=0)
    ranks[1].phase("wait for other ranks", step=8)
    ranks[0].phase("wait for other ranks", step=8)
    records = [{**r, "host": "elsewhere"} for r in read_records(tmp_path)]
    assert "slowest: rank 2 (colocated" in launcher._describe_stall(tmp_path, records, time.time())


def test_the_end_of_a_long_run_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are done and torchrun is not: what counts is when they ended, not how long the run took."""
    monkeypatch.setattr(launcher, "START_SECONDS", 1.0)
    record = RankRecord(tmp_path, 0, "colocated")
    record.phase("train", step=9)
    timer = threading.Timer(0.8, record.end, ["done"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.6)"])
    timer.start()
    launcher._watch(tmp_path, TrainingConfig(stall_seconds=1.0), child, tmp_path / "summary.json")
    assert child.returncode == 0 and not timer.is_alive()


def test_phases_count_seconds_and_are_visible_at_once(tmp_path: Path) -> None:
    record = RankRecord(tmp_path, 0, "colocated")
    record.phase("capture", step=3, microbatch=1)
    shown = json.loads((tmp_path / "ranks" / "rank-0.json").read_text())
    assert (shown["phase"], shown["step"], shown["microbatch"], shown["pid"]) == (
        "capture",
        3,
        1,
        os.getpid(),
    )
    time.sleep(0.02)
    record.phase("train")
    taken = record.take_seconds()
    assert taken["capture"] >= 0.02
    assert record.take_seconds().keys() == {"train"}


def test_one_node_needs_no_address_and_several_get_a_command_each() -> None:
    one = torchrun_arguments(TrainingConfig(num_drafter_ranks=2), Path("r/run.json"))
    assert one[:3] == ["--standalone", "--nproc-per-node", "2"]
    config = TrainingConfig(topology="split", num_target_ranks=12, num_drafter_ranks=4, num_nodes=2)
    commands = node_commands(config, Path("r/run.json"))
    assert len(commands) == 2
    assert "--nnodes 2" in commands[1] and "--nproc-per-node 8" in commands[1]
    assert "--node-rank 1" in commands[1] and "--rdzv-id r" in commands[1]


def test_ranks_that_do_not_divide_by_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="num_nodes: 2 does not divide the 3 ranks"):
        node_commands(TrainingConfig(num_drafter_ranks=3, num_nodes=2), Path("run.json"))


def test_the_hook_gets_run_and_message_and_a_broken_one_is_only_mentioned(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "told"
    notify(f'echo "$DFLASH_RUN: $DFLASH_MESSAGE" > {out}', tmp_path, "rank 1 died")
    assert out.read_text() == f"{tmp_path}: rank 1 died\n"
    notify("exit 3", tmp_path, "rank 1 died")
    assert "training.on_failure: 'exit 3' failed" in capsys.readouterr().out
    notify(None, tmp_path, "nobody is told")


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


def test_ctrl_c_while_watching_stops_what_was_started_and_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "_start", lambda *_: child)
    monkeypatch.setattr(launcher, "_watch", interrupted)
    told = tmp_path / "told"
    config = RunConfig(training=TrainingConfig(on_failure=f"touch {told}"))
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(tmp_path, config)
    assert child.poll() is not None and not told.exists()


def test_a_launch_waits_for_ranks_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)", "dflash_core.training"])
    record = {"rank": 0, "pid": left.pid, "host": socket.gethostname(), "started": time.time() + 1}
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").write_text(json.dumps(record))

    def start(*_: Any) -> None:
        assert not psutil.pid_exists(left.pid)
        raise InterruptedError("far enough")

    monkeypatch.setattr(launcher, "_start", start)
    with pytest.raises(InterruptedError):
        launcher.launch(tmp_path, RunConfig())


BLOCKED = """
import threading
from dflash_core.launch import stop_signal
stop_signal.STOP_SECONDS = 0.3
stop = stop_signal.StopSignal()
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_rank_whose_main_thread_is_blocked_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    started = time.monotonic()
    child.terminate()
    _, said = child.communicate(timeout=20)
    assert child.returncode == 128 + signal.SIGTERM and "the last complete checkpoint stands" in said
    assert time.monotonic() - started < 5


def test_a_stop_takes_less_than_28_seconds_in_all() -> None:
    """Ranks end by themselves before they are killed, and both before an engine of 30 s loses patience."""
    assert stop_signal.STOP_SECONDS + stop_signal.PEER_GRACE_SECONDS < launcher.TERMINATE_SECONDS
    assert launcher.TERMINATE_SECONDS + launcher.TORCHRUN_SECONDS + 1 < 28


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *a: None)
print(1, flush=True)
time.sleep(60)
"""


def test_stopping_kills_what_ignores_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child starts a child of its own that ignores TERM, in a session of its own as ranks are."""
    monkeypatch.setattr(launcher, "TERMINATE_SECONDS", 0.5)
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, process_group=0)
    assert child.stdout is not None
    lines = sorted(int(child.stdout.readline()) for _ in range(2))
    grandchild = lines[1]
    assert psutil.pid_exists(grandchild)
    started = time.monotonic()
    stop(tmp_path, child)
    assert child.poll() is not None
    assert time.monotonic() - started < launcher.TERMINATE_SECONDS + launcher.TORCHRUN_SECONDS + 1
    wait_until(lambda: not psutil.pid_exists(grandchild))
    stop(tmp_path, child)  # again: nothing to do
