"""The check of speeds finds the constant that was changed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.speed_check import check_speeds
from dflash_core.batching.cost import CostModel, predict
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig
from tests.support.cost_model import MODEL


def test_a_quadratic_term_explains_slow_padded_rows():
    """Speeds computed with attention ten times as expensive: the check finds that factor and no residual."""
    lengths = np.clip(np.random.default_rng(3).lognormal(6.5, 0.6, 20_000), 32, 4096).astype(np.int32)
    work = {
        name: build_plan(lengths, BatchingConfig(strategy=name, token_budget=8192), seed=0, epoch=0).work
        for name in ("sorted", "random", "bucketed")
    }
    expensive = CostModel(**{**MODEL.__dict__, "capture_pair": 10 * MODEL.capture_pair})
    measured = {
        name: float(w.tokens.sum()) / predict(w, expensive).capture_seconds for name, w in work.items()
    }
    check = check_speeds(work, measured, relative_to="sorted", model=MODEL)
    assert check.same_ranking
    assert check.residual["random"] > 0.1
    assert check.explanation["capture_pair"] == pytest.approx(10, rel=0.1)
    assert check.explained_residual["capture_pair"] < 0.01
