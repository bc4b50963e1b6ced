"""Metrics sent to MLflow: batches, no point twice, a server that is down."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.reporting import mlflow_run as tracking
from tasks.reporting.mlflow_run import BATCH_LIMIT, FLUSH_STEPS, Tracker


class Client:
    """Keeps the points that it receives; raises while `away`."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.points: list[tuple[str, int, float]] = []
        self.away = False
        self.status = ""

    def log_batch(self, run_id: str, metrics: list) -> None:
        if self.away:
            raise ConnectionError("away")
        self.calls.append(len(metrics))
        self.points += [(m.key, m.step, m.value) for m in metrics]

    def get_metric_history(self, run_id: str, key: str) -> list:
        return [SimpleNamespace(step=step) for name, step, _ in self.points if name == key]

    def set_terminated(self, run_id: str, status: str) -> None:
        if self.away:
            raise ConnectionError("away")
        self.status = status


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    # Batches close by steps alone: no clock in these tests.
    monkeypatch.setattr(tracking, "FLUSH_SECONDS", 1e9)
    return Client()


def tracker(client: Client, tmp_path: Path, resumed: bool = False) -> Tracker:
    marker = tmp_path / "open"
    tracking.write_marker(marker, uri="http://away", run_id="r")
    return Tracker(client=client, run_id="r", experiment_id="0", marker=marker, is_resumed=resumed)


def test_steps_are_sent_in_batches(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    for step in range(1, 2 * FLUSH_STEPS + 2):
        tracked.log({"a": 1.0, "b": 2.0}, step, 0)
    assert client.calls == [2 * FLUSH_STEPS, 2 * FLUSH_STEPS]
    tracked.close("FINISHED")
    assert sum(client.calls) == 2 * (2 * FLUSH_STEPS + 1)
    assert client.status == "FINISHED"
    assert not (tmp_path / "open").exists()


def test_no_call_is_larger_than_mlflow_takes(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    tracked.log({str(i): 1.0 for i in range(BATCH_LIMIT + 1)}, 1, 0)
    tracked.flush()
    assert client.calls == [BATCH_LIMIT, 1]


def test_values_that_are_not_finite_are_left_out(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    tracked.log({"a": float("nan"), "b": float("inf"), "c": 1.0}, 1, 0)
    tracked.flush()
    assert client.points == [("c", 1, 1.0)]


def test_a_resumed_run_continues_after_its_last_point(client: Client, tmp_path: Path) -> None:
    first = tracker(client, tmp_path)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step, 0)
    first.log({"validation/loss": 9.0}, 2, 0)
    first.flush()
    # From the checkpoint of step 1.
    again = tracker(client, tmp_path, resumed=True)
    for step in (2, 3, 4):
        again.log({"train/loss": float(step)}, step, 1)
    again.log({"validation/loss": 8.0}, 4, 1)
    again.flush()
    assert sorted(step for name, step, _ in client.points if name == "train/loss") == [1, 2, 3, 4]
    assert sorted(step for name, step, _ in client.points if name == "validation/loss") == [2, 4]


def test_what_a_kill_kept_from_mlflow_is_sent_by_the_next_process(client: Client, tmp_path: Path) -> None:
    lines = [{"step": step, "time_ms": step, "train/loss": 1.0, "note": "text"} for step in range(1, 8)]
    first = tracker(client, tmp_path)
    for line in lines[:3]:
        first.log(tracking.scalars(line), line["step"], line["time_ms"])
    first.flush()
    # In the buffer when the process is killed.
    for line in lines[3:6]:
        first.log(tracking.scalars(line), line["step"], line["time_ms"])
    again = tracker(client, tmp_path, resumed=True)
    again.catch_up(lines[:5])
    # The checkpoint was of step 4.
    for line in lines[4:]:
        again.log(tracking.scalars(line), line["step"], line["time_ms"])
    again.flush()
    assert client.points == [("train/loss", step, 1.0) for step in range(1, 8)]


def test_a_tracking_server_that_is_away_loses_nothing(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    client.away = True
    for step in range(1, FLUSH_STEPS + 1):
        tracked.log({"a": 1.0}, step, 0)
    assert client.points == []
    client.away = False
    assert tracked.close("FAILED")
    assert len(client.points) == FLUSH_STEPS
    assert client.status == "FAILED"


def test_a_run_is_not_complete_while_its_server_is_away(client: Client, tmp_path: Path) -> None:
    """The next command sends the points that the first one could not send, and closes the run."""
    lines = [{"step": step, "time_ms": step, "train/loss": 1.0} for step in range(1, 5)]
    tracked = tracker(client, tmp_path)
    client.away = True
    tracked.catch_up(lines)
    assert not tracked.close("FINISHED")
    client.away = False
    again = tracker(client, tmp_path, resumed=True)
    again.catch_up(lines)
    assert again.close("FINISHED")
    assert client.points == [("train/loss", step, 1.0) for step in range(1, 5)]
    assert client.status == "FINISHED"


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Record the runs that are closed through a new client: address, run, status."""
    import mlflow

    runs: list[tuple[str, str, str]] = []

    def client(uri: str) -> SimpleNamespace:
        return SimpleNamespace(set_terminated=lambda run_id, status: runs.append((uri, run_id, status)))

    monkeypatch.setattr(mlflow, "MlflowClient", client)
    return runs


def test_runs_of_processes_that_are_gone_are_closed(tmp_path: Path, closed: list) -> None:
    directory = tracking.open_marker(tmp_path, "any").parent
    directory.mkdir()
    names = ("running", "gone", "elsewhere", "ended")
    running, gone, elsewhere, ended = (directory / f"{name}.json" for name in names)
    for marker in (running, gone, elsewhere):
        tracking.write_marker(marker, uri="u", run_id=marker.stem)
    # Its process lives, and could not close it.
    tracking.write_marker(ended, uri="u", run_id="ended", status="FINISHED")
    for marker, other in ((gone, {"started": 0.0}), (elsewhere, {"pid": 2**22 + 1, "host": "another"})):
        marker.write_text(json.dumps(json.loads(marker.read_text()) | other))
    (directory / "torn.json").write_text("{")
    tracking.close_crashed_runs(tmp_path)
    assert sorted(closed) == [("u", "ended", "FINISHED"), ("u", "gone", "KILLED")]
    assert not ended.exists()
    assert running.exists()
    assert elsewhere.exists()
    assert not gone.exists()


def test_a_run_whose_server_was_away_at_its_end_gets_its_status_later(
    client: Client, tmp_path: Path, closed: list
) -> None:
    tracked = tracker(client, tmp_path)
    client.away = True
    tracked.close("FINISHED")
    assert tracked.marker.exists()
    tracking.close_marked(tracked.marker, "KILLED")
    assert closed == [("http://away", "r", "FINISHED")]
    assert not tracked.marker.exists()


@pytest.mark.parametrize(
    "state, status", [("is_cancelled", "KILLED"), ("is_crashed", "KILLED"), ("is_failed", "FAILED")]
)
def test_a_flow_that_ends_early_closes_its_run(tmp_path: Path, closed: list, state: str, status: str) -> None:
    marker = tracking.open_marker(tmp_path, "flow")
    marker.parent.mkdir()
    tracking.write_marker(marker, uri="u", run_id="r")
    names = ("is_cancelled", "is_cancelling", "is_crashed", "is_failed")
    state_of_flow = SimpleNamespace(**{name: lambda name=name: name == state for name in names})
    flow_run = SimpleNamespace(id="flow", parameters={"storage_root": str(tmp_path)})
    tracking.close_runs_of_flow(flow=None, flow_run=flow_run, state=state_of_flow)
    assert closed == [("u", "r", status)]
    assert not marker.exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment inside the checkout of another project holds files that this checkout does not track."""

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    installed = tmp_path / "env" / "module.py"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setattr(tracking, "__file__", str(installed))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "another project")
    assert tracking.git_commit() == "unknown"
    git("add", ".")
    git("commit", "-q", "-m", "this project")
    assert tracking.git_commit() == git("rev-parse", "HEAD")


def test_a_data_set_of_many_files_stays_below_mlflows_limit() -> None:
    shown = tracking._shown_files([f"{'x' * 300}-{i}" for i in range(100_000)])
    assert shown["num_files"] == 100_000
    assert len(json.dumps(shown)) < 65_535
