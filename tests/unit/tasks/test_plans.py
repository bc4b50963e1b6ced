"""Figures of the samples that plans are made of."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError
from tasks import plans


def test_beyond_a_limit_the_smallest_sources_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources 0 to 3 with 1, 3, 1, 2 samples: 1 and 3 stay apart, 0 and 2 are one."""
    source_id = np.array([0, 1, 1, 1, 2, 3, 3], np.int32)
    few = plans.pooled_sources(source_id)
    assert few.tolist() == source_id.tolist()
    assert few.dtype == np.int16
    monkeypatch.setattr(plans, "SHOWN_SOURCES", 3)
    assert plans.pooled_sources(source_id).tolist() == [2, 0, 0, 0, 2, 1, 1]


def test_ranks_that_wait_little_need_no_remark() -> None:
    assert plans.check_efficiency(0.95, 8, BatchingConfig()) is None


def test_ranks_that_wait_get_the_settings_that_fit() -> None:
    """Three microbatches for each of 8 ranks, less half a one: 23.5 budgets."""
    one_each = BatchingConfig(token_budget=49_152, tokens_per_step=393_216)
    assert plans.check_efficiency(0.892, 8, one_each) == (
        "8 ranks would work 89% of their time, by the cost model, with batching.token_budget 49152 and "
        "tokens_per_step 393216; 3 microbatches per rank even out: batching.tokens_per_step=1155072, or at "
        "the same step size batching.token_budget=16732, where the longest sample fits"
    )
    with pytest.raises(UserError, match="^training.num_drafter_ranks: 64 ranks would work 11% of their time"):
        plans.check_efficiency(0.112, 64, one_each)


def test_ranks_that_wait_for_costly_microbatches_are_not_advised_to_do_what_they_do() -> None:
    remark = plans.check_efficiency(0.88, 8, BatchingConfig())
    assert remark is not None
    assert remark.endswith("cost less than those of short ones, which have more anchors")
