"""Figures of the samples that plans are made of."""

from __future__ import annotations

import numpy as np
import pytest

from tasks import plans


def test_beyond_a_limit_the_smallest_sources_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources 0 to 3 with 1, 3, 1, 2 samples: 1 and 3 stay apart, 0 and 2 are one."""
    source_id = np.array([0, 1, 1, 1, 2, 3, 3], np.int32)
    few = plans.pooled_sources(source_id)
    assert few.tolist() == source_id.tolist()
    assert few.dtype == np.int16
    monkeypatch.setattr(plans, "SHOWN_SOURCES", 3)
    assert plans.pooled_sources(source_id).tolist() == [2, 0, 0, 0, 2, 1, 1]
