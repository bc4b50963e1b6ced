"""Statistics of a comparison, on numbers that a person can check."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dflash_core import run_statistics
from tests.support.compared_runs import run_metrics, summarise


def test_throughput_leaves_out_the_first_steps() -> None:
    seconds = np.full(40, 2.0)
    seconds[:3] = 60.0  # compilation
    rates = run_statistics.throughput(run_metrics(seconds=seconds))
    assert rates["tokens_per_second"] == 50.0  # 100 tokens in 2 s
    assert rates["capture_tokens_per_second"] == 200.0
    assert rates["drafter_tokens_per_second"] == 100.0
    assert rates["capture_seconds"] == 20.0  # 40 steps of 0.5 s, all of them


def test_regression_finds_the_swings_that_lengths_explain() -> None:
    rng = np.random.default_rng(0)
    steps = 200
    length = rng.normal(size=steps)
    trend = np.linspace(4, 2, steps)
    noise = rng.normal(size=steps)
    explained = run_statistics.regress_on_composition(trend + length, length[:, None])
    half = run_statistics.regress_on_composition(trend + length + noise, length[:, None])
    unrelated = run_statistics.regress_on_composition(trend + noise, length[:, None])
    assert explained["r2_composition"] == pytest.approx(1.0)
    assert half["r2_composition"] == pytest.approx(0.5, abs=0.1)  # equal variances
    assert unrelated["r2_composition"] < 0.05
    assert abs(half["residual_lag1"]) < 0.2  # independent noise has no memory
    assert half["loss_variance_around_trend"] < half["loss_variance"]


def test_clusters_show_in_the_lag_1_autocorrelation() -> None:
    noise = np.repeat([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0], 25)  # eight clusters of 25 steps
    statistics = run_statistics.regress_on_composition(noise, np.zeros((200, 1)))
    assert statistics["residual_lag1"] > 0.8
    assert statistics["r2_composition"] == pytest.approx(0.0)


def test_too_few_steps_give_no_statistics() -> None:
    assert run_statistics.regress_on_composition(np.ones(9), np.arange(9.0)[:, None]) is None
    assert np.isnan(run_statistics.loss_statistics(run_metrics(steps=5))["r2_composition"])


def test_steps_to_reach_uses_a_running_mean() -> None:
    loss = np.array([4.0, 1.0, 4.0, 2.0, 2.0, 2.0])
    assert run_statistics.steps_to_reach(loss, 2.0, window=1) == 2  # a single low step
    assert run_statistics.steps_to_reach(loss, 2.0, window=2) == 5  # steps 4
    assert 5
    assert run_statistics.steps_to_reach(loss, 0.5, window=1) is None


def test_ratio_is_to_sorted_and_the_well_mixed_one_is_recommended() -> None:
    slow, fast = np.full(40, 2.0), np.full(40, 1.95)
    comparison = summarise([run_metrics("sorted", seconds=fast), run_metrics("packed", seconds=slow)])
    assert comparison["strategies"]["packed"]["throughput_ratio_to_sorted"] == pytest.approx(0.975)
    assert comparison["ranked"]
    assert comparison["recommendation"].startswith("Use packed: 50 real tokens/s, 0.98 times sorted")
    assert "(30.00 for sorted)" in comparison["recommendation"]
    assert comparison["initial_loss_spread"] == 0.0


def test_a_strategy_that_is_much_faster_is_recommended() -> None:
    comparison = summarise([run_metrics("sorted", seconds=np.full(40, 1.0)), run_metrics("packed")])
    assert comparison["recommendation"].startswith("Use sorted: 100 real tokens/s")


def test_no_ranking_when_steps_differ_in_size() -> None:
    comparison = summarise([run_metrics("sorted"), run_metrics("packed", tokens=np.full(40, 103.0))])
    assert not comparison["ranked"]
    assert comparison["recommendation"].startswith("No ranking: real tokens per step differ by 3.0%")


def test_initial_losses_are_compared_within_a_seed() -> None:
    runs = [run_metrics(s, seed) for s in ("sorted", "packed") for seed in (0, 1)]
    losses = {("sorted", 0): 5.0, ("packed", 0): 5.0, ("sorted", 1): 4.0, ("packed", 1): 4.04}
    assert summarise(runs, initial_losses=losses)["initial_loss_spread"] == pytest.approx(0.04 / 4.02)
    assert summarise(runs, initial_losses={})["initial_loss_spread"] is None


def test_figures_that_are_nan_are_null_in_json() -> None:
    comparison = summarise([run_metrics("sorted", steps=5), run_metrics("packed", steps=5)])
    assert comparison["strategies"]["packed"]["r2_composition"] is None
    json.dumps(comparison, allow_nan=False)
