"""Agreement with a serving engine: what passes and what has to fail."""

from __future__ import annotations

import pytest

from dflash_core.serving.agreement import (
    StepCounts,
    compare_counts,
    compare_steps,
    steps_agree,
    wilson_interval,
)


def test_counts_by_hand() -> None:
    counts = StepCounts.of_steps([2, 0, 1, 3], block_size=4)
    assert counts == StepCounts(steps=4, accepted=(3, 2, 1))
    assert counts.engine_acceptance_length == 1 + 6 / 4
    assert StepCounts.of_steps([], block_size=3).engine_acceptance_length == 1.0


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    """Against published values of the Wilson score interval."""
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


ENGINE = StepCounts(steps=4000, accepted=(800, 160, 40))  # acceptance length 1.25


@pytest.mark.parametrize(
    "evaluator, agrees, why",
    [
        (StepCounts(steps=4000, accepted=(800, 160, 40)), True, "equal"),
        (StepCounts(steps=3990, accepted=(806, 150, 41)), True, "noise"),
        (StepCounts(steps=4000, accepted=(720, 200, 80)), False, "the same length by other positions"),
        (StepCounts(steps=4000, accepted=(835, 175, 48)), False, "5.8% more, inside all intervals"),
        (StepCounts(steps=4000, accepted=(400, 80, 20)), False, "half as good"),
    ],
)
def test_agreement_needs_every_position_and_the_length(evaluator: StepCounts, agrees: bool, why: str) -> None:
    comparison = compare_counts(ENGINE, evaluator)
    assert comparison["agrees"] is agrees, why
    if why.startswith("the same"):
        assert comparison["length_agrees"]
        assert [p["agrees"] for p in comparison["positions"]] == [False, False, False]
    if why.startswith("5.8%"):
        assert all(p["agrees"] for p in comparison["positions"])
        assert not comparison["length_agrees"]


def test_few_steps_prove_nothing() -> None:
    few = StepCounts(steps=2999, accepted=(600, 120, 30))
    comparison = compare_counts(few, few)
    assert (comparison["agrees"], comparison["length_agrees"], comparison["enough_steps"]) == (
        False,
        True,
        False,
    )


def test_a_drafter_that_drafts_nothing_agrees_with_itself_alone() -> None:
    nothing = StepCounts(steps=4000, accepted=(0, 0, 0))
    assert compare_counts(nothing, nothing)["agrees"] is True
    assert compare_counts(nothing, ENGINE)["agrees"] is False


def test_steps_are_compared_where_they_start_together() -> None:
    """Prompt 1: steps at 0, 2, 3 and at 0, 1, 3: together at 0 (2 against 1) and 3 (last for neither)."""
    engine, evaluator = [[2, 1, 2, 1], [1, 1]], [[1, 2, 2, 4], [3, 1]]
    counts = compare_steps(engine, evaluator)
    assert counts == {"equal": 1, "engine_more": 1, "evaluator_more": 1, "accepting": 3}


@pytest.mark.parametrize("differing, agrees", [(0, True), (5, True), (6, False)])
def test_steps_may_differ_at_a_twentieth_of_those_that_accept(differing: int, agrees: bool) -> None:
    counts = {"equal": 1000, "engine_more": differing, "evaluator_more": 0, "accepting": 100}
    assert steps_agree(counts) is agrees


def test_counts_of_real_checks_with_a_wrong_drafter_disagree() -> None:
    """An engine that normalised one layer's keys wrongly, and a drafter whose layers are one off."""
    for equal, more, less, accepting in ((3844, 70, 119, 2421), (941, 41, 90, 650)):
        counts = {"equal": equal, "engine_more": more, "evaluator_more": less, "accepting": accepting}
        assert not steps_agree(counts)
