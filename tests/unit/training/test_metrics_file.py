"""metrics.jsonl after a resume; work and waiting in a step, from seconds that can be added up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import TrainingConfig
from dflash_core.launch.layout import make_layout
from dflash_core.training.metrics_file import SPENT, MetricsFile, role_metrics


def test_opening_metrics_cuts_beyond_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')
    MetricsFile(path, 2, validated_step=-1).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("validated_step", [-1, 0, 2])
def test_a_validation_that_is_repeated_has_one_line(tmp_path: Path, validated_step: int) -> None:
    """A run that was stopped during the validation at step 2, or before its first checkpoint."""
    path = tmp_path / "metrics.jsonl"
    trained = ['{"step": 1, "train/loss": 3.0}\n', '{"step": 2, "train/loss": 2.0}\n']
    validated = {step: f'{{"step": {step}, "validation/loss": 1.0}}\n' for step in (0, 2)}
    path.write_text(validated[0] + "".join(trained) + validated[2])
    MetricsFile(path, 2, validated_step=validated_step)
    kept = [line for step, line in validated.items() if step <= validated_step]
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(trained + kept)


def test_seconds_of_a_split_step() -> None:
    """Step of 5 s, 1,200 tokens: 3 targets captured for 4 s each, 1 drafter trained 2 s and waited 3 s."""
    layout = make_layout(TrainingConfig(topology="split", num_target_ranks=3))
    spent = dict.fromkeys(SPENT, 0.0) | {
        "capture": 12.0,
        "train": 2.0,
        "wait": 3.0,
        "target_wait": 1.5,
        "inflight": 9.0,
        "reports": 6.0,
    }
    metrics = role_metrics(spent, layout, 5.0, 1200)
    assert metrics["perf/capture_seconds"] == 4.0
    assert metrics["perf/targets_busy"] == 0.8
    assert metrics["perf/drafter_seconds"] == 2.0
    assert metrics["perf/drafters_busy"] == 0.4
    assert metrics["perf/wait_seconds"] == 3.0
    assert metrics["perf/target_wait_seconds"] == 0.5
    assert metrics["perf/capture_tokens_per_second"] == 300
    assert metrics["perf/train_tokens_per_second"] == 600
    assert metrics["perf/inflight_microbatches"] == 1.5


def test_colocated_ranks_wait_for_no_other_role_and_may_overlap() -> None:
    layout = make_layout(TrainingConfig(num_drafter_ranks=2))
    spent = dict.fromkeys(SPENT, 0.0) | {"capture": 8.0, "train": 4.0}
    metrics = role_metrics(spent, layout, 5.0, 100)
    # A fifth overlaps.
    assert metrics["perf/targets_busy"] + metrics["perf/drafters_busy"] == pytest.approx(1.2)
    assert "perf/target_wait_seconds" not in metrics
    assert "perf/inflight_microbatches" not in metrics
    cached = role_metrics(spent | {"capture": 0.0}, layout, 5.0, 100)
    assert cached["perf/capture_seconds"] == 0
    assert "perf/capture_tokens_per_second" not in cached
