"""Metrics on plans small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.batching import synthetic_lengths
from benchmarks.rank_efficiency import efficiency
from dflash_core.batching.metrics import (
    identical_microbatch_share,
    mixing,
    plan_metrics,
    plan_report,
    rank_balance,
    rank_efficiency,
    repeated_pair_share,
    source_mixing,
    supervised_per_step,
)
from dflash_core.batching.plan import BatchPlan, build_plan
from dflash_core.config import BatchingConfig


def hand_made(microbatches: list[list[int]], lengths: list[int], per_step: int = 1) -> BatchPlan:
    """Return a packed plan with the given microbatches, `per_step` of them in each step."""
    rows = [np.array(lengths)[m] for m in microbatches]
    n = len(microbatches)
    return BatchPlan(
        order=np.concatenate(microbatches).astype(np.int32),
        offsets=np.cumsum([0, *map(len, microbatches)]).astype(np.int64),
        step_offsets=np.append(np.arange(0, n, per_step), n).astype(np.int64),
        widths=np.zeros(n, np.int32),
        tokens=np.array([r.sum() for r in rows], np.int64),
        squared_lengths=np.array([(r**2).sum() for r in rows], np.int64),
        draft_slots=np.zeros(n, np.int64),
        draft_pairs=np.zeros(n, np.int64),
        config=BatchingConfig(token_budget=10),
        seed=0,
        epoch=0,
    )


def test_mixing_by_hand():
    """Lengths 1 1 | 3 3: three times the i.i.d. value; 1 3 | 1 3: zero; one group or equal lengths: 1."""
    clumped = hand_made([[0, 1], [2, 3]], [1, 1, 3, 3])
    spread = hand_made([[0, 2], [1, 3]], [1, 1, 3, 3])
    assert plan_report(clumped)["mixing_microbatch"] == pytest.approx(3.0)
    assert plan_report(spread)["mixing_microbatch"] == pytest.approx(0.0)
    together = hand_made([[0, 1], [2, 3]], [1, 1, 3, 3], per_step=2)
    assert plan_report(together)["mixing_step"] == 1.0
    equal = hand_made([[0, 1], [2, 3]], [5, 5, 5, 5])
    assert plan_report(equal)["mixing_microbatch"] == 1.0


def test_mixing_of_random_groups_is_one():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1000, size=(4000, 10))
    value = mixing(
        np.arange(4000),
        samples=np.full(4000, 10),
        sums=lengths.sum(axis=1),
        squares=(lengths**2).sum(axis=1),
    )
    assert value == pytest.approx(1.0, abs=0.1)  # standard error 0.02


def test_source_mixing_by_hand():
    plan = hand_made([[0, 1], [2, 3]], [1, 1, 1, 1])
    assert source_mixing(plan, np.array([0, 0, 1, 1]), np.arange(2)) == pytest.approx(3.0)
    assert source_mixing(plan, np.array([0, 1, 0, 1]), np.arange(2)) == pytest.approx(0.0)
    assert source_mixing(plan, np.array([0, 0, 0, 0]), np.arange(2)) == 1.0


def test_repeated_pairs_by_hand():
    """[0 1 2] [3 4] then [0 1] [2 3 4]: of the pairs 01 23 24 34, 01 and 34 are repeated."""
    before, now = hand_made([[0, 1, 2], [3, 4]], [1] * 5), hand_made([[0, 1], [2, 3, 4]], [1] * 5)
    assert repeated_pair_share(before, now) == 0.5
    assert repeated_pair_share(now, now) == 1.0
    assert repeated_pair_share(before, hand_made([[0], [1], [2], [3], [4]], [1] * 5)) == 0.0


def test_identical_microbatches_by_hand():
    before = hand_made([[0, 1], [2, 3], [4, 5]], [1] * 6)
    now = hand_made([[3, 2], [0, 4], [1, 5]], [1] * 6)
    assert identical_microbatch_share(before, now) == pytest.approx(1 / 3)
    other = hand_made([[0, 1, 2], [3], [4, 5]], [1] * 6)
    assert identical_microbatch_share(before, other) == pytest.approx(1 / 3)


def test_supervised_tokens_per_step_by_hand():
    plan = hand_made([[2, 0], [1], [3]], [4, 4, 4, 4], per_step=2)
    assert supervised_per_step(plan, np.array([1, 2, 3, 4], np.int32)).tolist() == [6, 4]


def test_balance_by_hand():
    """Two equal microbatches on two ranks: 1; one microbatch on two ranks: one idles, largest / mean = 2."""
    assert rank_balance(hand_made([[0], [1]], [4, 4], per_step=2), 2)["seconds"] == pytest.approx(1.0)
    assert rank_balance(hand_made([[0]], [4]), 2)["seconds"] == pytest.approx(2.0)


def test_rank_efficiency_by_hand():
    """Steps of three equal microbatches on two ranks: of 2 x 2 places, 3 are used."""
    plan = hand_made([[0], [1], [2]], [4, 4, 4], per_step=3)
    assert rank_efficiency(plan, 1) == pytest.approx(1.0)
    assert rank_efficiency(plan, 2) == pytest.approx(0.75)
    assert rank_efficiency(plan, 3) == pytest.approx(1.0)


def test_the_defaults_keep_8_ranks_at_work():
    """They are three microbatches per rank; one leaves ranks waiting for a tenth of their time."""
    lengths, default = synthetic_lengths(60_000), BatchingConfig()
    assert default.tokens_per_step == default.token_budget * (3 * 8 - 0.5)
    assert efficiency(lengths, budget=default.token_budget, per_rank=3, short=0.5, ranks=8) >= 0.985
    assert efficiency(lengths, budget=49_152, per_rank=1, short=0.0, ranks=8) < 0.92


@pytest.mark.parametrize("n", [0, 1, 50])
def test_all_metrics_are_finite_numbers(n):
    lengths = np.arange(n, dtype=np.int32) % 7 + 1
    config = BatchingConfig(strategy="sorted_fresh", token_budget=20, tokens_per_step=60)
    before, plan = (build_plan(lengths, config, seed=0, epoch=e, draft_slots=lengths) for e in (0, 1))
    metrics = plan_metrics(
        plan, source_id=(lengths % 2).astype(np.int16), num_supervised=lengths, previous=before, world_size=3
    )
    assert all(np.isfinite(value) for value in metrics.values())
    expected = {"padding_efficiency", "fill", "mixing_step", "source_mixing_step", "repeated_pair_share"}
    assert expected <= metrics.keys()
