"""The cost model recovers known constants, and advice agrees with arithmetic and with published speeds."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from dflash_core.batching import BatchingConfig, CostModel, Work, build_plan
from dflash_core.batching.advice import check_speeds, forecast_strategies, recommend, split_devices
from dflash_core.batching.cost import predict
from dflash_core.errors import UserError

MODEL = CostModel(
    capture_slot=1e-3,
    capture_pair=1e-6,
    capture_token=5e-5,
    capture_microbatch=0.1,
    train_token=2e-4,
    train_draft_slot=3e-4,
    train_draft_pair=0.0,
    train_microbatch=0.05,
)


def some_work(n: int = 12) -> Work:
    rng = np.random.default_rng(0)
    return Work(**{f.name: rng.integers(100, 100_000, n) for f in fields(Work)})


def test_worked_seconds():
    """1,000 slots, 50,000 pairs, 900 tokens, 2,000 draft slots: capture 1 + 0.05 + 0.045 + 0.1, training
    0.18 + 0.6 + 0.05.
    """
    work = Work(**{f.name: np.array([v]) for f, v in zip(fields(Work), (1000, 50_000, 900, 2000, 7))})
    found = predict(work, MODEL)
    assert found.capture_seconds == pytest.approx(1.195)
    assert found.train_seconds == pytest.approx(0.83)
    assert MODEL.seconds(work)[0] == pytest.approx(found.seconds)


def test_fit_recovers_the_constants_and_never_goes_below_zero():
    work = some_work()
    parts = MODEL.parts(work)
    capture = sum(v for k, v in parts.items() if k.startswith("capture"))
    train = sum(v for k, v in parts.items() if k.startswith("train"))
    found = CostModel.fit(work, capture_seconds=capture, train_seconds=train)
    for f in fields(CostModel):
        assert getattr(found, f.name) == pytest.approx(getattr(MODEL, f.name), rel=1e-6, abs=1e-12)
    noise = np.random.default_rng(1).uniform(0.5, 1.5, len(capture))
    noisy = CostModel.fit(work, capture_seconds=capture * noise, train_seconds=train * noise)
    assert all(getattr(noisy, f.name) >= 0 for f in fields(CostModel))


def test_fit_needs_measurements():
    with pytest.raises(UserError, match="at least 2"):
        CostModel.fit(some_work(1), capture_seconds=np.ones(1), train_seconds=np.ones(1))
    with pytest.raises(UserError, match="not above 0"):
        CostModel.fit(some_work(2), capture_seconds=np.array([1.0, 0.0]), train_seconds=np.ones(2))


def test_worked_split():
    """8 devices, 10 captured and 30 trained a second each: 6 capture 60, 2 train 60, nobody waits."""
    best = split_devices(8, capture_rate=10, train_rate=30)[0]
    assert (best.num_target, best.num_drafter, best.tokens_per_second, best.waiting_share) == (6, 2, 60, 0)
    assert split_devices(2, capture_rate=1, train_rate=5)[0].bound_by == "target"
    with pytest.raises(UserError, match="at least 2"):
        split_devices(1, capture_rate=1, train_rate=1)


def test_forecasts_rank_by_work_and_recommend_with_a_reason():
    lengths = np.clip(np.random.default_rng(3).lognormal(6.5, 0.6, 20_000), 32, 4096).astype(np.int32)
    config = BatchingConfig(token_budget=8192, tokens_per_step=300_000)
    found = forecast_strategies(lengths, config, draft_slots=lengths, model=MODEL, epochs=2)
    speed = {f.strategy: f.tokens_per_second for f in found}
    assert found[0].strategy == "packed" and found[-1].strategy == "random"
    assert speed["sorted_fresh"] > speed["bucketed"] > speed["random"]
    packed = found[0]
    assert packed.hours * 3600 == pytest.approx(2 * lengths.sum() / packed.tokens_per_second)
    assert recommend(found)[0] == "packed"
    strategy, reason = recommend(
        found, can_pack=False
    )  # sorted_fresh: too many pairs meet again in so few samples
    assert strategy == "bucketed" and "less speed than sorted" in reason


def test_a_quadratic_term_explains_slow_padded_rows():
    """Speeds made with attention ten times as dear: the check finds that factor and nothing left over."""
    lengths = np.clip(np.random.default_rng(3).lognormal(6.5, 0.6, 20_000), 32, 4096).astype(np.int32)
    work = {
        name: build_plan(lengths, BatchingConfig(strategy=name, token_budget=8192), seed=0, epoch=0).work
        for name in ("sorted", "random", "bucketed")
    }
    dear = CostModel(**{**MODEL.__dict__, "capture_pair": 10 * MODEL.capture_pair})
    measured = {name: float(w.tokens.sum()) / predict(w, dear).capture_seconds for name, w in work.items()}
    check = check_speeds(work, measured, relative_to="sorted", model=MODEL)
    assert check.same_ranking and check.residual["random"] > 0.1
    assert check.explanation["capture_pair"] == pytest.approx(10, rel=0.1)
    assert check.explained_residual["capture_pair"] < 0.01
