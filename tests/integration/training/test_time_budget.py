"""`training.max_minutes` chooses a number of steps, and that alone: with a clock of its own, on any ranks."""

from __future__ import annotations

import functools
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.ranks import console, run_ranks, start_ranks, wait_for
from benchmarks.support.tiny_run import losses, read_metrics, weights, write_run
from tests.support.injected_faults import slow_clock
from tests.support.run_control import signal_rank, when_step

pytestmark = pytest.mark.usefixtures("one_thread")

# Ten seconds per reading of the clock: 10 for a validation, 5 for a step (two are rehearsed), 60 before the
# first step. Eight steps with validations at 5 and 8 end after 120 s; a ninth would exceed 97% of 126 s.
CLOCK = functools.partial(slow_clock, seconds=10.0)
MINUTES, STEPS = 2.1, 8


@pytest.fixture(scope="module")
def limited(root: Path, tiny_target_dir: Path) -> Path:
    """Return the run that is told its number of steps."""
    run_dir, config = write_run(root, tiny_target_dir, {"training": {"max_steps": STEPS}}, name="limited")
    run_ranks(run_dir, config)
    return run_dir


def timed(root: Path, target: Path, **training: Any) -> tuple[Path, Any]:
    changes = {"training": {"max_minutes": MINUTES, **training}}
    return write_run(root, target, changes, name="timed-" + "-".join(training))


def assert_equal(run_dir: Path, limited: Path) -> None:
    """Steps, losses, validations and weights, bit for bit."""
    assert len(losses(run_dir)) == STEPS
    assert losses(run_dir) == losses(limited)
    ours, theirs = (read_metrics(d, "validation/loss") for d in (run_dir, limited))
    assert [(s, v["validation/loss"]) for s, v in ours.items()] == [
        (s, v["validation/loss"]) for s, v in theirs.items()
    ]
    for name, tensor in weights(run_dir).items():
        assert np.array_equal(tensor, weights(limited)[name]), name


def test_the_run_is_that_of_max_steps_and_resumes_with_its_number(
    root: Path, limited: Path, tiny_target_dir: Path
) -> None:
    """The clock of the resumed run, the real one, would allow all steps."""
    run_dir, config = timed(root, tiny_target_dir)
    processes = start_ranks(run_dir, config, CLOCK)
    when_step(run_dir, 3, lambda: signal_rank(run_dir, 0, signal.SIGTERM)).join()
    assert wait_for(processes) == [143]
    run_ranks(run_dir, config)
    assert_equal(run_dir, limited)
    planned = json.loads((run_dir / "summary.json").read_text())["planned_steps"]
    assert planned > STEPS
    assert f"training.max_minutes 2.1: {STEPS} of {planned} steps at 5.00 s per step, about 2:00 in all" in (
        console(run_dir)
    )
    assert read_metrics(run_dir, "train/total_steps")[0]["train/total_steps"] == STEPS


def test_all_ranks_of_a_split_run_agree(root: Path, limited: Path, tiny_target_dir: Path) -> None:
    """Their clocks differ: that of rank 0 decides. Two drafters share the weights, so results are close."""
    run_dir, config = timed(root, tiny_target_dir, topology="split", num_drafter_ranks=2, parallel="fsdp2")
    run_ranks(run_dir, config, functools.partial(_clock_by_rank, seconds=10.0))
    assert losses(run_dir) == pytest.approx(losses(limited), rel=1e-5)


def _clock_by_rank(rank: int, *, seconds: float) -> None:
    slow_clock(rank, seconds=seconds * (1 + rank))


def test_a_time_without_a_step_is_refused(root: Path, tiny_target_dir: Path) -> None:
    run_dir, config = timed(root, tiny_target_dir, max_minutes=0.5)
    with pytest.raises(RuntimeError, match="training.max_minutes: 0.5 is not allowed: one step would end"):
        run_ranks(run_dir, config, CLOCK)
    assert not list((run_dir / "checkpoints").glob("step-*"))
