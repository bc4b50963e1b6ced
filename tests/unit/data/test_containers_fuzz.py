"""Damaged files by seed; `python -m tests.support.fuzz_containers --minutes 60` checks many more."""

from __future__ import annotations

import pytest

from tests.support.fuzz_containers import check_seed


def test_damaged_files_lose_no_intact_row() -> None:
    outcomes = {check_seed(seed).split()[-1] for seed in range(100)}
    assert outcomes == {"read", "valid", "failed", "memory"}


@pytest.mark.long
def test_twenty_thousand_damaged_files() -> None:
    for seed in range(20_000):
        check_seed(seed)
