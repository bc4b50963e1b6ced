"""The same seed and plans give the same training on any ranks: 20 steps within 1e-5 relative, in float32.

Catches a mean of means, a gradient averaged over ranks, samples that move between steps, anchors that depend
on a rank, and collectives that a rank without anchors or without a microbatch does not join. The data has
samples without anchors, and steps with fewer microbatches than ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.ranks import run_ranks, start_on_two_machines
from benchmarks.support.tiny_run import losses, read_metrics, write_run
from tests.support.injected_faults import probed

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20
COMMON = {
    "batching": {"tokens_per_step": 200},
    "training": {
        "max_steps": STEPS,
        "validate_every": 100,
        "checkpoint_every_steps": 100,
        "check_initial_loss": True,
    },
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "two colocated": {"num_drafter_ranks": 2},
    "split 1+1": {"topology": "split"},
    "split 2+1": {"topology": "split", "num_target_ranks": 2, "max_inflight_microbatches": 1},
    "fsdp2": {"num_drafter_ranks": 2, "parallel": "fsdp2"},
    "two machines": {"num_drafter_ranks": 2, "num_nodes": 2, "launcher": "external"},
}


@pytest.fixture(scope="module")
def alone(root: Path, tiny_target_dir: Path) -> Path:
    run_dir, config = write_run(root, tiny_target_dir, COMMON, name="alone")
    run_ranks(run_dir, config)
    assert len(losses(run_dir)) == STEPS
    return run_dir


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_same_training(name: str, root: Path, alone: Path, tiny_target_dir: Path) -> None:
    """Each run starts with the memory probe, normally left out on a CPU, which must not change the result."""
    changes = {**COMMON, "training": {**COMMON["training"], **TOPOLOGIES[name]}}
    run_dir, config = write_run(root, tiny_target_dir, changes, name=name.replace(" ", "-"))
    if config.training.num_nodes == 1:
        run_ranks(run_dir, config, probed)
    else:
        start_on_two_machines(run_dir, config)
    expected, actual = read_metrics(alone), read_metrics(run_dir)
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    for step in expected:
        for field in ("train/lr", "batch/num_samples", "batch/tokens"):
            assert actual[step][field] == expected[step][field]
        for field in ("train/loss", "train/grad_norm"):
            assert actual[step][field] == pytest.approx(expected[step][field], rel=1e-5), (step, field)
        assert_plausible_roles(actual[step], split=config.training.topology == "split")
    final = [read_metrics(d, "validation/loss")[STEPS]["validation/loss"] for d in (alone, run_dir)]
    assert final[1] == pytest.approx(final[0], rel=1e-5)
    assert_same_initial_loss(alone, run_dir)


def assert_plausible_roles(line: dict[str, Any], *, split: bool) -> None:
    """Check the work and waiting of the roles in the line of a step."""
    assert line["perf/capture_seconds"] > 0
    assert line["perf/drafter_seconds"] > 0
    assert 0 < line["perf/drafters_busy"] <= 1
    assert line["perf/capture_tokens_per_second"] > 0
    assert ("perf/target_wait_seconds" in line) == split
    if split:
        assert 1 <= line["perf/inflight_microbatches"] <= 2
    else:
        assert line["perf/wait_seconds"] == 0


@pytest.mark.parametrize("strategy", ["random", "sorted_fresh"])
def test_every_strategy_has_the_same_initial_loss(
    strategy: str, root: Path, alone: Path, tiny_target_dir: Path
) -> None:
    """Other microbatches, padded rows, another order: the same samples with the same anchors."""
    changes = {**COMMON, "batching": {**COMMON["batching"], "strategy": strategy}}
    run_dir, config = write_run(root, tiny_target_dir, changes, name=strategy)
    run_ranks(run_dir, config)
    assert losses(run_dir)[0] != pytest.approx(losses(alone)[0], rel=1e-3)  # the steps do differ
    assert_same_initial_loss(alone, run_dir)


def assert_same_initial_loss(alone: Path, run_dir: Path) -> None:
    expected, actual = (json.loads((d / "initial_loss.json").read_text()) for d in (alone, run_dir))
    for field in ("loss", "weight_sum"):
        assert actual.pop(field) == pytest.approx(expected.pop(field), rel=1e-5)
    assert actual == expected
    assert actual["num_samples"] > 20
    assert int(actual["anchor_digest"], 16) > 0
