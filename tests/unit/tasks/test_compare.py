"""The comparison's report and metrics, on numbers that a person can check."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tasks import compare, report
from tests.support.compared_runs import run_metrics, summarise


def test_source_shares_of_steps() -> None:
    """Two steps: microbatches (samples 0, 1), (2) and (3, 4); sources 0 0 1 and 1 1."""
    plan = SimpleNamespace(
        order=np.arange(5),
        num_steps=2,
        samples_per_microbatch=np.array([2, 1, 2]),
        step_of_microbatch=lambda: np.array([0, 0, 1]),
    )
    lengths = SimpleNamespace(source_id=np.array([0, 0, 1, 1, 1], np.int16))
    assert compare.step_composition(plan, lengths).tolist() == [[2 / 3, 1 / 3], [0.0, 1.0]]


def test_markdown_names_what_was_not_checked() -> None:
    comparison = summarise([run_metrics("sorted"), run_metrics("packed")], initial_losses={})
    text = compare.to_markdown(comparison | {"deployment": "d", "edges": [0, 9], "anchors_equal": None})
    assert "Mean loss of the initial weights: not checked." in text
    assert "| packed |" in text


def test_plan_figures_are_means_and_pairs_start_with_the_second_epoch() -> None:
    epochs = [
        {"metrics": {"padding_efficiency": 0.8, "mixing_step": 1.0}},
        {"metrics": {"padding_efficiency": 0.9, "mixing_step": 2.0, "repeated_pair_share": 0.5}},
    ]
    figures = report.plan_figures({"packed": epochs})["packed"]
    assert figures == pytest.approx(
        {"padding_efficiency": 0.85, "mixing_step": 1.5, "repeated_pair_share": 0.5}
    )


def test_each_run_of_a_strategy_gets_its_own_figures_in_mlflow() -> None:
    plans = [{"metrics": {"padding_efficiency": 0.9, "mixing_step": 2.0, "num_shapes": 3}}]
    evaluation = {"acceptance_length": 1.5, "acceptance_by_position": [0.5, 0.25]}
    result = compare.Result(
        strategy="packed",
        seed=1,
        plans=plans,
        trained={"summary": {"validation_last": {"validation/loss": 2.5}}},
        evaluation=evaluation,
        predicted_seconds=None,
        initial=None,
    )
    run = run_metrics("packed", 1, steps=5, loss=np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
    metrics = compare.run_metrics({"throughput_ratio_to_sorted": None}, result, run, level=2.0, window=1)
    assert metrics["final/loss_last"] == 1.0
    assert metrics["final/steps_to_level"] == 4
    assert metrics["final/validation_loss"] == 2.5
    assert metrics["accept/position_2"] == 0.25
    assert metrics["final/mixing_step"] == metrics["batch/mixing_step"] == 2.0
    assert "batch/num_shapes" not in metrics  # charts of a few figures, not of all
    assert "final/throughput_ratio_to_sorted" not in metrics  # nothing to compare with
    assert "final/r2_composition" not in metrics  # too few steps
