"""The trace of the engine has to fit its metrics."""

from __future__ import annotations

import pytest

from dflash_core.serving.agreement import (
    StepCounts,
)
from dflash_core.serving.check import check_trace, engine_counts
from tests.support.engine_answers import engine_answer


def test_the_trace_of_the_engine_has_to_fit_its_metrics() -> None:
    """Two prompts: the prefill's token, then steps; the last step of the second was cut by two tokens."""
    good = engine_answer([[1, 2, 1], [1, 3, 1]], steps=4, accepted=[3, 2, 0])
    check_trace(good)
    assert engine_counts(good) == StepCounts(steps=4, accepted=(3, 2, 0))
    for wrong in (
        engine_answer([[1, 2, 1], [1, 3, 1]], steps=3, accepted=[3, 2, 0]),  # outputs that hold two steps
        engine_answer([[1, 2, 1], [1, 3, 1]], steps=4, accepted=[2, 0, 0]),  # accepted, yet not counted
        engine_answer(
            [[1, 2, 1], [1, 3, 1]], steps=4, accepted=[4, 4, 4]
        ),  # more than the last steps can hide
    ):
        with pytest.raises(AssertionError):
            check_trace(wrong)
