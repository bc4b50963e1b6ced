"""Metrics on their way to a tracking server: in order, nothing lost, nothing sent twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.launch import metrics_forwarder
from dflash_core.launch.metrics_forwarder import MetricsForwarder
from dflash_core.training.metrics_file import MetricsFile
from tests.support.waiting import wait_until


def write_lines(path: Path, steps: range, **values: Any) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time_ms": 1000 + step, "train/loss": 1.0, **values}) + "\n")


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_forwarder, "POLL_SECONDS", 0.01)


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
    failures = 3

    def flaky(lines: list[dict[str, Any]]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError("server is away")
        got.extend(line["step"] for line in lines)

    forwarder = MetricsForwarder(tmp_path, flaky)
    write_lines(tmp_path, range(1, 11))
    assert forwarder.finish(30) is None
    assert got == list(range(1, 11))


def test_lines_that_never_arrive_are_named(tmp_path: Path) -> None:
    def away(lines: list[dict[str, Any]]) -> None:
        raise ConnectionError("server is away")

    forwarder = MetricsForwarder(tmp_path, away)
    write_lines(tmp_path, range(1, 3))
    problem = forwarder.finish(0.5)
    assert problem is not None
    assert "server is away" in problem
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
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 4, validated_step=4)
    for step in range(5, 10):
        metrics.write(step, {"train/loss": 1.0})
        if step == 5:
            metrics.write(step, {"validation/loss": 2.0})
    metrics.close()
    assert resumed.finish(20) is None
    assert [s for s, kind in got if kind == "train"] == list(range(1, 10))
    assert [s for s, kind in got if kind == "validation"] == [5]


@pytest.mark.parametrize("text", ["", "[]", "null", '{"train": null}', "[" * 100_000])
def test_a_damaged_record_of_what_was_sent_sends_all_again(tmp_path: Path, text: str) -> None:
    write_lines(tmp_path, range(1, 4))
    (tmp_path / "metrics.forwarded.json").write_text(text)
    got: list[int] = []
    assert MetricsForwarder(tmp_path, lambda lines: got.extend(x["step"] for x in lines)).finish(20) is None
    assert got == [1, 2, 3]
