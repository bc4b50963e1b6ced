"""Edges against brute force, the cost formula against simulation, and small cases a person can check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dflash_core.batching.buckets import edge_curve, edges_of_lengths, optimal_edges
from dflash_core.batching.metrics import plan_report
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError


def test_worked_static_edges():
    """Ten of 3, ten of 4, ten of 9: {3 4} {9} costs 20 * 4 + 90 = 170 slots, {3} {4 9} costs 30 + 180."""
    edges = optimal_edges([3, 4, 9], [10, 10, 10], num_buckets=2, token_budget=9, shapes="static")
    assert edges.tolist() == [0, 4, 9]


def test_static_edges_are_the_optimum_over_all_edges():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = np.sort(rng.choice(np.arange(1, 60), size=9, replace=False))
        counts = rng.integers(1, 50, size=9)

        def padded(edges, values=values, counts=counts):
            tops = np.asarray(edges)[np.searchsorted(edges, values)]
            return int((counts * tops).sum())

        for k in (1, 2, 3, 4):
            edges = optimal_edges(values, counts, num_buckets=k, token_budget=64, shapes="static")
            best = min(
                padded([*inner, values[-1]]) for inner in itertools.combinations(values[:-1].tolist(), k - 1)
            )
            assert len(edges) == k + 1
            assert padded(edges[1:]) == best


def test_dynamic_efficiency_is_what_plans_reach():
    """The formula against plans of 30,000 lengths: never too low, a little high with few buckets."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6, 0.7, 30_000), 16, 4096).astype(np.int32)
    values, counts = np.unique(lengths, return_counts=True)
    curve = edge_curve(values, counts, max_buckets=16, token_budget=65_536)
    assert (np.diff(curve.efficiency) >= -1e-12).all()
    for k in (1, 2, 4, 8, 16):
        config = BatchingConfig(
            strategy="bucketed", edges=tuple(map(int, curve.edges[k - 1])), token_budget=65_536
        )
        reached = plan_report(build_plan(lengths, config, seed=0, epoch=0))["padding_efficiency"]
        assert -0.003 < curve.efficiency[k - 1] - reached < (0.02 if k < 8 else 0.005)


def test_optimal_edges_beat_quantiles():
    rng = np.random.default_rng(2)
    lengths = np.clip(rng.lognormal(6, 0.7, 20_000), 16, 4096).astype(np.int32)
    optimal = edges_of_lengths(lengths, num_buckets=6, token_budget=16_384)
    quantiles = (0, *np.quantile(lengths, np.arange(1, 7) / 6, method="higher").astype(int).tolist())
    reached = []
    for edges in (tuple(optimal.tolist()), quantiles):
        config = BatchingConfig(strategy="bucketed", edges=edges, token_budget=16_384)
        reached.append(plan_report(build_plan(lengths, config, seed=0, epoch=0))["padding_efficiency"])
    assert reached[0] > reached[1] + 0.01


@pytest.mark.parametrize("shapes", ["dynamic", "static"])
def test_more_buckets_than_lengths(shapes):
    """Seven samples of three lengths, ten buckets wanted: three are returned, each sample in one."""
    lengths = np.array([5, 5, 7, 7, 7, 2, 2], np.int32)
    edges = edges_of_lengths(lengths, num_buckets=10, token_budget=16, shapes=shapes)
    assert edges.tolist() == [0, 2, 5, 7]
    assert edges_of_lengths(lengths[:0], num_buckets=10, token_budget=16).tolist() == [0, 1]


def test_many_lengths_go_through_a_grid():
    values = np.arange(1, 5001)
    curve = edge_curve(values, np.ones(5000, int), max_buckets=8, token_budget=5000, shapes="static")
    assert [len(edges) for edges in curve.edges] == list(range(2, 10))
    for edges in curve.edges:
        assert (np.diff(edges) > 0).all()
        assert edges[0] == 0
        assert edges[-1] == 5000
    assert 1 <= curve.knee <= 8


def test_a_mistake_names_the_field():
    with pytest.raises(UserError, match="token_budget: 4 .* 5 tokens"):
        optimal_edges([5], [1], num_buckets=1, token_budget=4)
    with pytest.raises(UserError, match="num_buckets: 0"):
        optimal_edges([5], [1], num_buckets=0, token_budget=8)
