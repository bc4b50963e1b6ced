"""Advice agrees with arithmetic: forecasts, recommendation, and the split of devices."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.batching.advice import forecast_strategies, recommend, split_devices
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError
from tests.support.cost_model import MODEL


def test_worked_split():
    """8 devices that capture 10 or train 30 tokens per second: 6 capture 60, 2 train 60, none waits."""
    best = split_devices(8, capture_rate=10, train_rate=30)[0]
    assert (best.num_target, best.num_drafter) == (6, 2)
    assert best.tokens_per_second == 60
    assert best.waiting_share == 0
    assert split_devices(2, capture_rate=1, train_rate=5)[0].bound_by == "target"
    with pytest.raises(UserError, match="at least 2"):
        split_devices(1, capture_rate=1, train_rate=1)


def test_forecasts_rank_by_work_and_recommend_with_a_reason():
    lengths = np.clip(np.random.default_rng(3).lognormal(6.5, 0.6, 20_000), 32, 4096).astype(np.int32)
    config = BatchingConfig(token_budget=8192, tokens_per_step=300_000)
    forecasts = forecast_strategies(lengths, config, draft_slots=lengths, model=MODEL, epochs=2)
    speed = {f.strategy: f.tokens_per_second for f in forecasts}
    assert forecasts[0].strategy == "packed"
    assert forecasts[-1].strategy == "random"
    assert speed["sorted_fresh"] > speed["bucketed"] > speed["random"]
    packed = forecasts[0]
    assert packed.hours * 3600 == pytest.approx(2 * lengths.sum() / packed.tokens_per_second)
    assert recommend(forecasts)[0] == "packed"
    # not sorted_fresh: too many pairs repeat in so few samples
    strategy, reason = recommend(forecasts, can_pack=False)
    assert strategy == "bucketed"
    assert "less speed than sorted" in reason
