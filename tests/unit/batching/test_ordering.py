"""Interleaving, the end of a step and the assignment of a step to ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_core.batching.metrics import plan_report, rank_balance
from dflash_core.batching.ordering import assign_to_ranks, close_steps, interleave
from dflash_core.batching.plan import build_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig


def test_any_window_holds_one_of_each_class():
    """1,200 microbatches of length 0..1199, 12 per step: 12 neighbours anywhere hold one of each hundred."""
    order = interleave(np.arange(1200.0), per_step=12, key=np.uint64(7))
    assert np.sort(order).tolist() == list(range(1200))
    classes = order // 100
    for start in range(1200 - 12):
        assert len(set(classes[start : start + 12].tolist())) == 12


def test_worked_steps():
    assert close_steps(np.array([4, 4, 4, 4, 4]), 6).tolist() == [0, 2, 4, 5]
    assert close_steps(np.array([9, 1, 1]), 1).tolist() == [0, 1, 2, 3]
    assert close_steps(np.empty(0, np.int64), 5).tolist() == [0]


def test_worked_assignment_to_ranks():
    """Costs 8 7 6 5 4 3 2 1 on two ranks: 18 each; neighbours run at the same time."""
    cost = np.array([8.0, 7, 6, 5, 4, 3, 2, 1])
    assigned = assign_to_ranks(cost, cost[:, None], 2)
    assert cost[assigned].sum(axis=1).tolist() == [18.0, 18.0]
    for column in assigned.T:
        assert abs(cost[column[0]] - cost[column[1]]) == 1.0
    assert assign_to_ranks(cost[:3], cost[:3, None], 2)[:, -1].tolist().count(-1) == 1
    assert assign_to_ranks(cost, cost[:, None], 1).tolist() == [list(range(8))]


@pytest.fixture(scope="module")
def lengths():
    return np.clip(np.random.default_rng(3).lognormal(6.5, 0.6, 60_000), 32, 4096).astype(np.int32)


@pytest.mark.parametrize("strategy", ["sorted_fresh", "bucketed", "packed"])
def test_steps_are_mixed_and_ranks_balanced(lengths, strategy):
    """64 microbatches per step, 8 ranks: steps vary less than i.i.d., ranks differ by a few percent."""
    slots = np.minimum(512, lengths * 6 // 10).astype(np.int32) * 16
    config = BatchingConfig(strategy=strategy, token_budget=8192)
    step = int(63.5 * build_plan(lengths, config, seed=0, epoch=0).tokens.mean())
    plans = [
        build_plan(
            lengths, replace(config, order=order, tokens_per_step=step), seed=0, epoch=0, draft_slots=slots
        )
        for order in ("random", "mixed")
    ]
    random, mixed = (plan_report(plan) for plan in plans)
    assert random["padding_efficiency"] == mixed["padding_efficiency"]
    assert mixed["mixing_step"] < 0.6
    if not STRATEGIES[strategy].is_packed:
        assert random["mixing_step"] > 3
    balance = rank_balance(plans[1], 8)
    assert balance["seconds"] < 1.035
    assert balance["draft_slots"] < 1.05


def test_the_order_of_sorted_is_random_by_definition(lengths):
    config = BatchingConfig(strategy="sorted", token_budget=8192, tokens_per_step=500_000)
    plan = build_plan(lengths, config, seed=0, epoch=0)
    assert plan_report(plan)["mixing_step"] > 3
