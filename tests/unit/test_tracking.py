"""Metrics on their way to MLflow: batches, no double points, a server that is away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import tracking
from tasks.tracking import BATCH_LIMIT, FLUSH_STEPS, Tracker


class Client:
    """Keeps what it is sent; refuses while `away`."""

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
        self.status = status


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(
        tracking, "FLUSH_SECONDS", 1e9
    )  # batches close by steps alone: no clock in these tests
    return Client()


def tracker(client: Client, tmp_path: Path, resumed: bool = False) -> Tracker:
    marker = tmp_path / "open"
    marker.write_text("x")
    return Tracker(client=client, run_id="r", marker=marker, _resumed=resumed)


def test_steps_are_sent_in_batches(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    for step in range(1, 2 * FLUSH_STEPS + 2):
        tracked.log({"a": 1.0, "b": 2.0}, step, 0)
    assert client.calls == [2 * FLUSH_STEPS, 2 * FLUSH_STEPS]
    tracked.close("FINISHED")
    assert sum(client.calls) == 2 * (2 * FLUSH_STEPS + 1) and client.status == "FINISHED"
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


def test_a_resumed_run_goes_on_after_its_last_point(client: Client, tmp_path: Path) -> None:
    first = tracker(client, tmp_path)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step, 0)
    first.log({"validation/loss": 9.0}, 2, 0)
    first.flush()
    again = tracker(client, tmp_path, resumed=True)  # from the checkpoint of step 1
    for step in (2, 3, 4):
        again.log({"train/loss": float(step)}, step, 1)
    again.log({"validation/loss": 8.0}, 4, 1)
    again.flush()
    assert sorted(step for name, step, _ in client.points if name == "train/loss") == [1, 2, 3, 4]
    assert sorted(step for name, step, _ in client.points if name == "validation/loss") == [2, 4]


def test_a_tracking_server_that_is_away_loses_nothing(client: Client, tmp_path: Path) -> None:
    tracked = tracker(client, tmp_path)
    client.away = True
    for step in range(1, FLUSH_STEPS + 1):
        tracked.log({"a": 1.0}, step, 0)
    assert client.points == []
    client.away = False
    tracked.close("FAILED")
    assert len(client.points) == FLUSH_STEPS and client.status == "FAILED"
