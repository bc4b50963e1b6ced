"""Invariants of every plan over adversarial lengths, and small plans a person can check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.batching.metrics import plan_report
from dflash_core.batching.plan import build_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError

BUDGET = 257


def shapes_of_trouble() -> st.SearchStrategy[np.ndarray]:
    """Draw lengths up to BUDGET: any, equal, all maximal, one huge, powers of two plus one, or extremes."""
    count = st.integers(0, 120)
    powers = st.lists(st.sampled_from([2, 3, 5, 9, 17, 33, 65, 129, 257]), max_size=80)
    return st.one_of(
        st.lists(st.integers(1, BUDGET), max_size=120),
        st.builds(lambda length, n: [length] * n, st.integers(1, BUDGET), count),
        st.builds(lambda n: [BUDGET] * n, count),
        st.builds(lambda n: [1] * n + [BUDGET], count),
        powers,
        st.builds(lambda n: [1, BUDGET] * n, st.integers(0, 60)),
    ).map(lambda values: np.array(values, np.int32))


configs = st.builds(
    lambda strategy, order, shapes, buckets, step, pool: BatchingConfig(
        strategy=strategy,
        order=order,
        shapes=shapes,
        num_buckets=buckets,
        tokens_per_step=step,
        token_budget=BUDGET,
        sort_quantum=8,
        pool_size=pool,
    ),
    st.sampled_from(tuple(STRATEGIES)),
    st.sampled_from(["mixed", "random"]),
    st.sampled_from(["dynamic", "static"]),
    st.integers(1, 300),
    st.integers(1, 3000),
    st.sampled_from([1, 5, 1024]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shapes_of_trouble(), configs, st.integers(0, 5))
def test_every_sample_once_and_never_over_budget(lengths, config, epoch):
    plan = build_plan(lengths, config, seed=1, epoch=epoch)
    assert np.sort(plan.order).tolist() == list(range(len(lengths)))
    assert plan.dropped == {}
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(lengths)
    assert (np.diff(plan.offsets) > 0).all()
    for microbatch in range(plan.num_microbatches):
        inside = lengths[plan.samples(microbatch)]
        width = plan.widths[microbatch]
        slots = inside.sum() if width == 0 else len(inside) * width
        assert slots <= BUDGET
        assert width == 0 or width >= inside.max()
        assert (width == 0) == STRATEGIES[config.strategy].is_packed
        if width and not (STRATEGIES[config.strategy].uses_edges and config.shapes == "static"):
            assert width == inside.max()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes_of_trouble(), configs)
def test_steps_close_at_the_first_microbatch_that_reaches_the_tokens(lengths, config):
    plan = build_plan(lengths, config, seed=1, epoch=0)
    assert plan.step_offsets[0] == 0
    assert plan.step_offsets[-1] == plan.num_microbatches
    for step in range(plan.num_steps):
        tokens = plan.tokens[plan.step_offsets[step] : plan.step_offsets[step + 1]]
        assert tokens[:-1].sum() < config.tokens_per_step
        assert tokens.sum() >= config.tokens_per_step or step == plan.num_steps - 1


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes_of_trouble(), configs, st.integers(1, 9))
def test_ranks_share_a_step_in_equal_counts(lengths, config, world_size):
    plan = build_plan(lengths, config, seed=1, epoch=0, draft_slots=lengths // 2)
    for step in range(plan.num_steps):
        assigned = [plan.for_rank(rank, world_size, step) for rank in range(world_size)]
        assert len({len(ids) for ids in assigned}) == 1
        busy = sorted(int(i) for ids in assigned for i in ids if i >= 0)
        assert busy == list(range(plan.step_offsets[step], plan.step_offsets[step + 1]))
        assert all(i >= 0 for ids in assigned for i in ids[:-1])  # idle only in the last column


@settings(max_examples=50, deadline=None, derandomize=True)
@given(shapes_of_trouble(), configs)
def test_the_same_plan_twice(lengths, config):
    first = build_plan(lengths, config, seed=4, epoch=2)
    again = build_plan(lengths.tolist(), config, seed=4, epoch=2)
    assert first.digest == again.digest


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_and_seeds_differ(strategy):
    lengths = (np.arange(500) * 37 % 251 + 1).astype(np.int32)
    config = BatchingConfig(strategy=strategy, token_budget=1000, tokens_per_step=3000)
    digests = {build_plan(lengths, config, seed=s, epoch=e).digest for s in range(3) for e in range(3)}
    assert len(digests) == 9


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [0, 1])
def test_no_sample_and_one_sample(strategy, n):
    plan = build_plan(np.full(n, 7), BatchingConfig(strategy=strategy, token_budget=7), seed=0, epoch=0)
    assert (plan.num_microbatches, plan.num_steps) == (n, n)
    assert plan_report(plan)["padding_efficiency"] == 1.0


def test_worked_sorted():
    """Budget 10: 2 3 3 | 4 4 | 5 5 | 9; a fourth row of 4 would make 16 slots, a third of 5 would make 15."""
    lengths = np.array([9, 3, 4, 5, 2, 4, 3, 5])
    config = BatchingConfig(strategy="sorted", token_budget=10, tokens_per_step=1)
    plan = build_plan(lengths, config, seed=0, epoch=0)
    rows = sorted(lengths[plan.samples(i)].tolist() for i in range(plan.num_microbatches))
    assert rows == [[2, 3, 3], [4, 4], [5, 5], [9]]
    assert plan_report(plan)["num_slots"] == 9 + 8 + 10 + 9


def test_worked_packed():
    """Budget 10: each pack is a 6 and a 4, whatever the order."""
    config = BatchingConfig(token_budget=10, tokens_per_step=20)
    for seed in range(20):
        plan = build_plan([6, 4, 6, 4, 6, 4], config, seed=seed, epoch=0)
        assert plan.tokens.tolist() == [10, 10, 10]
        assert plan.step_offsets.tolist() == [0, 2, 3]  # 20 tokens close a step; the rest is kept


def test_worked_static_shapes():
    """Edges 4 and 8, budget 16: rows padded to 4 (four fit) or 8 (two fit)."""
    config = BatchingConfig(
        strategy="bucketed", shapes="static", edges=(0, 4, 8), token_budget=16, tokens_per_step=1
    )
    plan = build_plan([1, 2, 3, 4, 4, 5, 6, 8], config, seed=0, epoch=0)
    shapes = sorted(zip(plan.widths.tolist(), plan.samples_per_microbatch.tolist()))
    assert shapes == [(4, 1), (4, 4), (8, 1), (8, 2)]


def test_a_mistake_names_the_field_and_the_value():
    with pytest.raises(UserError, match=r"token_budget: 10 .* 11 tokens"):
        build_plan([3, 11], BatchingConfig(token_budget=10), seed=0, epoch=0)
    with pytest.raises(UserError, match=r"lengths\[1\]: 0 "):
        build_plan([3, 0], BatchingConfig(), seed=0, epoch=0)
    with pytest.raises(UserError, match="last edge 8 .* 9 tokens"):
        build_plan([3, 9], BatchingConfig(strategy="bucketed", edges=(0, 8)), seed=0, epoch=0)
    with pytest.raises(UserError, match="static shapes"):
        config = BatchingConfig(strategy="bucketed", shapes="static", edges=(0, 16), token_budget=10)
        build_plan([3, 9], config, seed=0, epoch=0)
    with pytest.raises(UserError, match="draft_slots"):
        build_plan([3, 9], BatchingConfig(), seed=0, epoch=0, draft_slots=[1])
