"""A stopped and resumed run equals an undisturbed one: bit for bit on the same ranks, closely on others."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.ranks import console, run_ranks, start_ranks, wait_for
from benchmarks.support.tiny_run import losses, read_metrics, weights, write_run
from dflash_core.batching.storage import load_plan
from dflash_core.config import RunConfig
from tests.support.run_control import newest_checkpoint, signal_rank, when_step, with_training

STOPPED = 143  # exit code of a rank after SIGTERM


@pytest.fixture(scope="module")
def undisturbed(root: Path, tiny_target_dir: Path) -> Path:
    run_dir, config = write_run(root, tiny_target_dir, name="undisturbed")
    run_ranks(run_dir, config)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == len(losses(run_dir))
    assert summary["updates"] == summary["steps"]
    return run_dir


def stop_at(run_dir: Path, config: RunConfig, step: int, rank: int = 0) -> int:
    """Train until `step` is logged, then SIGTERM to one rank; returns the step of the newest checkpoint."""
    processes = start_ranks(run_dir, config)
    when_step(run_dir, step, lambda: signal_rank(run_dir, rank, signal.SIGTERM)).join()
    assert set(wait_for(processes)) == {STOPPED}
    return newest_checkpoint(run_dir)


def assert_equal_runs(run_dir: Path, undisturbed: Path) -> None:
    """Losses of all steps, validations and weights, bit for bit."""
    assert losses(run_dir) == losses(undisturbed)
    for kind in ("validation/loss", "validation/acceptance_length"):
        actual, expected = (read_metrics(d, kind) for d in (run_dir, undisturbed))
        assert {s: v[kind] for s, v in actual.items()} == {s: v[kind] for s, v in expected.items()}
    ours, theirs = weights(run_dir), weights(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert np.array_equal(tensor, theirs[name]), name


def test_two_interruptions_and_a_truncated_checkpoint(
    root: Path, undisturbed: Path, tiny_target_dir: Path
) -> None:
    run_dir, config = write_run(root, tiny_target_dir, name="interrupted")
    first = stop_at(run_dir, config, 2)
    assert first >= 2  # nothing that was completed is lost
    second = stop_at(run_dir, config, first + 3)
    assert second >= first + 3
    damaged = run_dir / "checkpoints" / f"step-{second:08d}"
    tensors = next(damaged.glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    run_ranks(run_dir, config)
    output = console(run_dir)
    assert f"skipped checkpoint {damaged.name}:" in output
    assert "resuming from" in output
    assert_equal_runs(run_dir, undisturbed)


def test_resume_at_the_last_step_of_an_epoch(root: Path, undisturbed: Path, tiny_target_dir: Path) -> None:
    """A run can resume from each of its checkpoints; here from the end of the first epoch."""
    run_dir, config = write_run(root, tiny_target_dir, name="epoch-end")
    # By time alone: an interval that ends within every step.
    every_step = with_training(
        run_dir, config, checkpoint_every_seconds=1e-6, checkpoint_every_steps=10**6, keep_last=1000
    )
    run_ranks(run_dir, every_step)
    assert_equal_runs(run_dir, undisturbed)
    boundary = load_plan(run_dir / "epoch-000.parquet").num_steps
    for checkpoint in (run_dir / "checkpoints").iterdir():
        if int(checkpoint.name[5:]) > boundary:
            shutil.rmtree(checkpoint)
    assert newest_checkpoint(run_dir) == boundary
    run_ranks(run_dir, every_step)
    assert_equal_runs(run_dir, undisturbed)


def test_resume_on_other_ranks(root: Path, undisturbed: Path, tiny_target_dir: Path) -> None:
    """One process, then a target and two drafters with sharded weights, then one process again."""
    run_dir, config = write_run(root, tiny_target_dir, name="other-ranks")
    first = stop_at(run_dir, config, 3)
    sharded = with_training(run_dir, config, topology="split", num_drafter_ranks=2, parallel="fsdp2")
    assert stop_at(run_dir, sharded, first + 3) >= first + 3
    run_ranks(run_dir, with_training(run_dir, config))
    expected, actual = read_metrics(undisturbed), read_metrics(run_dir)
    assert list(actual) == list(expected)
    for step, line in expected.items():
        assert actual[step]["train/lr"] == line["train/lr"]
        assert actual[step]["batch/num_samples"] == line["batch/num_samples"]
        assert actual[step]["train/loss"] == pytest.approx(line["train/loss"], rel=1e-5)


def test_the_best_checkpoint_survives_a_resume_and_is_exported(undisturbed: Path) -> None:
    """Also when a later validation is worse: the stored best counts, not the first after a resume."""
    summary = json.loads((undisturbed / "summary.json").read_text())
    by_step = {s: v["validation/loss"] for s, v in read_metrics(undisturbed, "validation/loss").items()}
    assert 0 in by_step
    assert summary["steps"] in by_step
    assert summary["best_validation_loss"] == min(by_step.values())
    assert summary["exported_step"] == summary["best_step"] == min(by_step, key=lambda s: by_step[s])


def test_a_cached_run_equals_itself_after_a_resume(root: Path, tiny_target_dir: Path) -> None:
    """The cache is filled in another order after a resume; the states it holds are the same ones."""
    changes = {"target": {"cache": "memory"}, "objective": {"labels": "target"}}
    whole, config = write_run(root, tiny_target_dir, changes, name="cached")
    run_ranks(whole, config)
    run_dir, config = write_run(root, tiny_target_dir, changes, name="cached-interrupted")
    stop_at(run_dir, config, 10)
    run_ranks(run_dir, config)
    assert_equal_runs(run_dir, whole)
    on_disk, config = write_run(
        root, tiny_target_dir, {**changes, "target": {"cache": "disk"}}, name="on-disk"
    )
    run_ranks(on_disk, config)
    assert_equal_runs(on_disk, whole)


def test_a_checkpoint_of_another_run_is_rejected_with_both_values(
    root: Path, undisturbed: Path, tiny_target_dir: Path
) -> None:
    named = undisturbed / "checkpoints" / f"step-{newest_checkpoint(undisturbed):08d}"
    changes = {
        "drafter": {"block_size": 6},
        "optimizer": {"lr": 1e-3},
        "training": {"resume_from": str(named)},
    }
    run_dir, config = write_run(root, tiny_target_dir, changes, name="misfit")
    with pytest.raises(RuntimeError) as rejection:
        run_ranks(run_dir, config)
    message = str(rejection.value)
    assert "drafter.block_size: 4 -> 6" in message
    assert "optimizer.lr: 0.003 -> 0.001" in message
    assert str(named) in message
    assert not list((run_dir / "checkpoints").iterdir())


def test_a_signal_to_one_rank_stops_all_at_the_same_step(root: Path, tiny_target_dir: Path) -> None:
    run_dir, config = write_run(
        root, tiny_target_dir, {"training": {"num_drafter_ranks": 2}}, name="one-signal"
    )
    assert stop_at(run_dir, config, 3, rank=1) >= 3
