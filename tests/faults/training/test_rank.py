"""Ranks, launchers and flows that die or hang: nothing left, the cause named, the next launch ends equal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.ranks import run_ranks
from benchmarks.support.tiny_run import assert_nothing_left, losses, processes_of, write_run
from dflash_core.launch import launcher
from dflash_core.launch.launcher import TrainingFailed, launch
from dflash_core.launch.rank_status import read_records
from tests.support.injected_faults import out_of_memory, small_files
from tests.support.run_control import (
    last_step,
    launcher_pid,
    newest_checkpoint,
    signal_rank,
    when_step,
    with_training,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# About 80 steps of some 50 ms: time enough for a fault.
SPLIT: dict[str, Any] = {
    "batching": {"tokens_per_step": 100},
    "training": {"topology": "split", "epochs": 3, "validate_every": 1000, "checkpoint_every_steps": 4},
}
DRAFTER, TARGET = 0, 1
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def expected(root: Path, tiny_target_dir: Path) -> list[float]:
    """Losses of the undisturbed run."""
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="undisturbed")
    run_ranks(run_dir, config)
    return losses(run_dir)


def kill_rank(rank: int) -> Callable[[Path], None]:
    return lambda run_dir: signal_rank(run_dir, rank, signal.SIGKILL)


def kill_launcher(run_dir: Path) -> None:
    os.kill(launcher_pid(run_dir), signal.SIGKILL)


def test_one_run_killed_in_two_ways(
    root: Path, expected: list[float], tiny_target_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A target rank, then torchrun itself; each launch continues where the one before ended."""
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="killed")
    kills = [
        (kill_rank(TARGET), r"rank 1 \(target, pid \d+ on .*\) ended without a report in phase"),
        (kill_launcher, "stopped by a signal at step"),
    ]
    for action, words in kills:
        thread = when_step(run_dir, last_step(run_dir) + 4, partial(action, run_dir))
        with pytest.raises(TrainingFailed, match=words):
            launch(run_dir, config)
        thread.join()
        assert_nothing_left(run_dir)
    # torchrun's own log of what the messages say.
    assert "exitcode" not in capfd.readouterr().err
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


def test_a_killed_drafter(root: Path, expected: list[float], tiny_target_dir: Path) -> None:
    """The target, whose connection closes, is not named as the cause."""
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="kill-drafter")
    thread = when_step(run_dir, 5, partial(kill_rank(DRAFTER), run_dir))
    with pytest.raises(
        RuntimeError, match=r"rank 0 \(drafter, pid \d+ on .*\) ended without a report in phase"
    ):
        run_ranks(run_dir, config)
    thread.join()
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


FLOW = """
import sys
from dflash_core.config import RunConfig, from_dict
from dflash_core.launch.launcher import launch
import json
run = json.load(open(sys.argv[1] + "/run.json"))
launch(sys.argv[1], from_dict(RunConfig, run["config"]))
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
    ids=["kill", "ctrl-c"],
)
def test_the_process_that_launched_is_gone(
    number: signal.Signals, root: Path, expected: list[float], tiny_target_dir: Path
) -> None:
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name=f"flow-{number.name}")
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(run_dir)], cwd=ROOT)
    thread = when_step(run_dir, 5, lambda: flow.send_signal(number))
    flow.wait(1000)
    thread.join()
    assert flow.returncode != 0
    assert_nothing_left(run_dir)
    assert newest_checkpoint(run_dir) >= 5  # the ranks got SIGTERM, so the last completed step was saved
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


def test_a_hanging_rank_is_found_and_named(
    root: Path, expected: list[float], tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = TARGET
    monkeypatch.setattr(launcher, "TERMINATE_SECONDS", 3.0)  # a stopped process ends only by SIGKILL
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name=f"hang-{rank}")
    message = run_dir / "message"
    impatient = with_training(
        run_dir, config, stall_seconds=5.0, on_failure=f'echo "$DFLASH_MESSAGE" > {message}'
    )
    thread = when_step(run_dir, 5, lambda: signal_rank(run_dir, rank, signal.SIGSTOP))
    with pytest.raises(TrainingFailed, match="stall: no rank has moved") as stall:
        launch(run_dir, impatient)
    thread.join()
    role = read_records(run_dir)[rank]["role"]
    assert f"slowest: rank {rank} ({role}, pid" in str(stall.value)
    assert "stall: no rank has moved" in message.read_text()
    # The rank that could still run shows where it waits.
    stacks = (run_dir / "ranks" / f"rank-{1 - rank}.stacks").read_text()
    assert "most recent call first" in stacks
    assert "training" in stacks
    assert_nothing_left(run_dir, 5)
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


def test_a_disk_that_is_full_while_saving(root: Path, expected: list[float], tiny_target_dir: Path) -> None:
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="full")
    with pytest.raises(RuntimeError) as failure:
        run_ranks(run_dir, config, partial(small_files, num_bytes=150_000))
    message = str(failure.value)
    assert "rank 0 (drafter on" in message
    assert "could not be written" in message
    assert "is the disk full?" in message
    assert "GB free there" in message
    assert not list((run_dir / "checkpoints").iterdir())
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


@pytest.mark.parametrize(("what", "at"), [("train", DRAFTER), ("capture", TARGET)])
def test_memory_that_runs_out_later(
    what: str, at: int, root: Path, expected: list[float], tiny_target_dir: Path
) -> None:
    """The run ends with a checkpoint of the last completed step and says what to change."""
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name=f"memory-{what}")
    with pytest.raises(RuntimeError, match="out of memory: lower training.max_draft_slots .now 64"):
        run_ranks(run_dir, config, partial(out_of_memory, at=at, call=30, what=what))
    assert newest_checkpoint(run_dir) == last_step(run_dir) > 4
    run_ranks(run_dir, config)
    assert losses(run_dir) == expected


def test_a_run_directory_that_cannot_be_written(root: Path, tiny_target_dir: Path) -> None:
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="unwritable")
    (run_dir / "checkpoints").write_text("a file is in the way")
    with pytest.raises(RuntimeError, match=r"rank 0 \(drafter on .*checkpoints"):
        run_ranks(run_dir, config)


def test_steps_that_are_not_finite_are_counted_and_end_the_run(root: Path, tiny_target_dir: Path) -> None:
    changes = {
        **SPLIT,
        "optimizer": {"lr": 1e30, "warmup_share": 0.0},
        "training": {**SPLIT["training"], "max_nonfinite_steps": 3},
    }
    run_dir, config = write_run(root, tiny_target_dir, changes, name="nan")
    with pytest.raises(RuntimeError, match="3 in a row"):
        run_ranks(run_dir, config)
    shutil.rmtree(run_dir)
    changes["training"] |= {"nonfinite": "stop"}
    run_dir, config = write_run(root, tiny_target_dir, changes, name="nan")
    with pytest.raises(RuntimeError, match="1 in a row .training.nonfinite stop"):
        run_ranks(run_dir, config)


@pytest.mark.long  # 20 s of waiting; quick tests in integration/launch/test_launcher.py cover its parts
def test_a_cancellation_takes_less_than_28_seconds_even_with_a_stuck_rank(
    root: Path, tiny_target_dir: Path
) -> None:
    """Prefect cancels by an exception in the thread that launched; here while one rank is stopped."""
    run_dir, config = write_run(root, tiny_target_dir, SPLIT, name="cancel")
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(run_dir)], cwd=ROOT)
    marks: dict[str, float] = {}

    def cancel() -> None:
        signal_rank(run_dir, TARGET, signal.SIGSTOP)
        marks["cancelled"] = time.monotonic()
        flow.send_signal(signal.SIGINT)

    thread = when_step(run_dir, 5, cancel)
    flow.wait(1000)
    thread.join()
    assert time.monotonic() - marks["cancelled"] < 28
    assert processes_of(run_dir) == []


@pytest.mark.long
def test_kills_at_random_moments() -> None:
    """The benchmark, shorter: it fails unless the killed run ends equal to the undisturbed one."""
    command = [sys.executable, "-m", "benchmarks.soak", "--kills", "6", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"kills": 6' in done.stdout.splitlines()[-1]
    assert '"identical": true' in done.stdout
