"""The cost model against arithmetic, and its fit against known constants."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from dflash_core.batching.cost import CostModel, Work, predict
from dflash_core.errors import UserError
from tests.support.cost_model import MODEL


def some_work(n: int = 12) -> Work:
    rng = np.random.default_rng(0)
    return Work(**{f.name: rng.integers(100, 100_000, n) for f in fields(Work)})


def test_worked_seconds():
    """1,000 slots, 50,000 pairs, 900 tokens, 2,000 draft slots.

    Capture takes 1 + 0.05 + 0.045 + 0.1 seconds, training 0.18 + 0.6 + 0.05.
    """
    work = Work(**{f.name: np.array([v]) for f, v in zip(fields(Work), (1000, 50_000, 900, 2000, 7))})
    prediction = predict(work, MODEL)
    assert prediction.capture_seconds == pytest.approx(1.195)
    assert prediction.train_seconds == pytest.approx(0.83)
    assert MODEL.seconds(work)[0] == pytest.approx(prediction.seconds)


def test_fit_recovers_the_constants_and_never_goes_below_zero():
    work = some_work()
    parts = MODEL.parts(work)
    capture = sum(v for k, v in parts.items() if k.startswith("capture"))
    train = sum(v for k, v in parts.items() if k.startswith("train"))
    fitted = CostModel.fit(work, capture_seconds=capture, train_seconds=train)
    for f in fields(CostModel):
        assert getattr(fitted, f.name) == pytest.approx(getattr(MODEL, f.name), rel=1e-6, abs=1e-12)
    noise = np.random.default_rng(1).uniform(0.5, 1.5, len(capture))
    noisy = CostModel.fit(work, capture_seconds=capture * noise, train_seconds=train * noise)
    assert all(getattr(noisy, f.name) >= 0 for f in fields(CostModel))


def test_fit_needs_measurements():
    with pytest.raises(UserError, match="at least 2"):
        CostModel.fit(some_work(1), capture_seconds=np.ones(1), train_seconds=np.ones(1))
    with pytest.raises(UserError, match="0.0 is not allowed; allowed: above 0"):
        CostModel.fit(some_work(2), capture_seconds=np.array([1.0, 0.0]), train_seconds=np.ones(2))
