"""What a comparison computes, on numbers that a person can check."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_core import run_statistics as comparison
from tasks import compare, report
from tasks.reporting import tables


def run_metrics(strategy: str = "packed", seed: int = 0, steps: int = 40, **changes) -> comparison.RunMetrics:
    values = {
        "loss": np.linspace(4.0, 2.0, steps),
        "grad_norm": np.ones(steps),
        "tokens": np.full(steps, 100.0),
        "samples": np.full(steps, 5.0),
        "seconds": np.full(steps, 2.0),
        "capture_seconds": np.full(steps, 0.5),
        "drafter_seconds": np.full(steps, 1.0),
        "mean_length": np.full(steps, 20.0),
        "source_shares": np.ones((steps, 1)),
        "epoch": np.zeros(steps, np.int64),
    } | changes
    return comparison.RunMetrics(strategy=strategy, seed=seed, **values)


def test_throughput_leaves_out_the_first_steps() -> None:
    seconds = np.full(40, 2.0)
    seconds[:3] = 60.0  # compilation
    found = comparison.throughput(run_metrics(seconds=seconds))
    assert found["tokens_per_second"] == 50.0  # 100 tokens in 2 s
    assert found["capture_tokens_per_second"] == 200.0 and found["drafter_tokens_per_second"] == 100.0
    assert found["capture_seconds"] == 20.0  # 40 steps of 0.5 s, all of them


def test_regression_finds_the_swings_that_lengths_explain() -> None:
    rng = np.random.default_rng(0)
    steps = 200
    length = rng.normal(size=steps)
    trend = np.linspace(4, 2, steps)
    noise = rng.normal(size=steps)
    explained = comparison.regress_on_composition(trend + length, length[:, None])
    half = comparison.regress_on_composition(trend + length + noise, length[:, None])
    unrelated = comparison.regress_on_composition(trend + noise, length[:, None])
    assert explained["r2_composition"] == pytest.approx(1.0)
    assert half["r2_composition"] == pytest.approx(0.5, abs=0.1)  # equal variances
    assert unrelated["r2_composition"] < 0.05
    assert abs(half["residual_lag1"]) < 0.2  # independent noise has no memory
    assert half["loss_variance_around_trend"] < half["loss_variance"]


def test_clusters_show_in_the_lag_1_autocorrelation() -> None:
    noise = np.repeat([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0], 25)  # eight clusters of 25 steps
    found = comparison.regress_on_composition(noise, np.zeros((200, 1)))
    assert found["residual_lag1"] > 0.8 and found["r2_composition"] == pytest.approx(0.0)


def test_too_few_steps_say_nothing() -> None:
    assert comparison.regress_on_composition(np.ones(9), np.arange(9.0)[:, None]) is None
    assert np.isnan(comparison.loss_statistics(run_metrics(steps=5))["r2_composition"])


def test_steps_to_reach_uses_a_running_mean() -> None:
    loss = np.array([4.0, 1.0, 4.0, 2.0, 2.0, 2.0])
    assert comparison.steps_to_reach(loss, 2.0, window=1) == 2  # a single low step
    assert comparison.steps_to_reach(loss, 2.0, window=2) == 5  # steps 4 and 5
    assert comparison.steps_to_reach(loss, 0.5, window=1) is None


def summarise(runs: list, **changes) -> dict:
    keys = [(run.strategy, run.seed) for run in runs]
    figures = {"padding_efficiency": 0.9, "mixing_step": 1.0, "mixing_microbatch": 1.0}
    plans = {strategy: dict(figures) for strategy, _ in keys}
    plans.get("sorted", {})["mixing_step"] = 30.0
    given = {
        "plans": plans,
        "summaries": {key: {"updates": 40, "validation_last": {"validation/loss": 2.5}} for key in keys},
        "evaluations": {
            key: {"acceptance_length": 1.2, "acceptance_interval": [1.1, 1.3], "lossless": True}
            for key in keys
        },
        "initial_losses": dict.fromkeys(keys, 5.0),
    } | changes
    return comparison.summarise(runs, **given)


def test_ratio_is_to_sorted_and_the_well_mixed_one_is_recommended() -> None:
    slow, fast = np.full(40, 2.0), np.full(40, 1.95)
    found = summarise([run_metrics("sorted", seconds=fast), run_metrics("packed", seconds=slow)])
    assert found["strategies"]["packed"]["throughput_ratio_to_sorted"] == pytest.approx(0.975)
    assert found["ranked"] and found["recommendation"].startswith(
        "Use packed: 50 real tokens/s, 0.98 times sorted"
    )
    assert "(30.00 for sorted)" in found["recommendation"]
    assert found["initial_loss_spread"] == 0.0


def test_a_strategy_that_is_much_faster_is_recommended() -> None:
    found = summarise([run_metrics("sorted", seconds=np.full(40, 1.0)), run_metrics("packed")])
    assert found["recommendation"].startswith("Use sorted: 100 real tokens/s")


def test_no_ranking_when_steps_differ_in_size() -> None:
    found = summarise([run_metrics("sorted"), run_metrics("packed", tokens=np.full(40, 103.0))])
    assert not found["ranked"] and found["recommendation"].startswith(
        "No ranking: real tokens per step differ by 3.0%"
    )


def test_initial_losses_are_compared_within_a_seed() -> None:
    runs = [run_metrics(s, seed) for s in ("sorted", "packed") for seed in (0, 1)]
    losses = {("sorted", 0): 5.0, ("packed", 0): 5.0, ("sorted", 1): 4.0, ("packed", 1): 4.04}
    assert summarise(runs, initial_losses=losses)["initial_loss_spread"] == pytest.approx(0.04 / 4.02)
    assert summarise(runs, initial_losses={})["initial_loss_spread"] is None


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


def test_markdown_says_what_was_not_checked() -> None:
    found = summarise([run_metrics("sorted"), run_metrics("packed")], initial_losses={})
    text = compare.to_markdown(found | {"deployment": "d", "edges": [0, 9], "anchors_equal": None})
    assert "Mean loss of the initial weights: not checked." in text and "| packed |" in text


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (True, "yes"),
        (0.12345, "0.123"),
        (12345.6, "12,346"),
        (1234, "1,234"),
        ([1.0, 2.0], "1.000 to 2.000"),
    ],
)
def test_figures_as_text(value: object, text: str) -> None:
    assert tables.show(value) == text


def test_plan_figures_are_means_and_pairs_start_with_the_second_epoch() -> None:
    epochs = [
        {"metrics": {"padding_efficiency": 0.8, "mixing_step": 1.0}},
        {"metrics": {"padding_efficiency": 0.9, "mixing_step": 2.0, "repeated_pair_share": 0.5}},
    ]
    figures = report.plan_figures({"packed": epochs})["packed"]
    assert figures == pytest.approx(
        {"padding_efficiency": 0.85, "mixing_step": 1.5, "repeated_pair_share": 0.5}
    )


def test_what_cannot_be_told_is_null_in_json() -> None:
    found = summarise([run_metrics("sorted", steps=5), run_metrics("packed", steps=5)])
    assert found["strategies"]["packed"]["r2_composition"] is None
    json.dumps(found, allow_nan=False)


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
    found = compare.run_metrics({"throughput_ratio_to_sorted": None}, result, run, level=2.0, window=1)
    assert found["final/loss_last"] == 1.0 and found["final/steps_to_level"] == 4
    assert found["final/validation_loss"] == 2.5 and found["accept/position_2"] == 0.25
    assert found["final/mixing_step"] == found["batch/mixing_step"] == 2.0
    assert "batch/num_shapes" not in found  # charts of a few figures, not of all
    assert "final/throughput_ratio_to_sorted" not in found  # nothing to compare with
    assert "final/r2_composition" not in found  # too few steps
