"""Fixtures of the tests of launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_core.launch.rank_status import RankRecord


@pytest.fixture
def rank_record() -> Iterator[Callable[..., RankRecord]]:
    """`RankRecord` for a test, whose files are closed afterwards."""
    with contextlib.ExitStack() as records:

        def make(run_dir: Path, rank: int, role: str) -> RankRecord:
            return records.enter_context(contextlib.closing(RankRecord(run_dir, rank, role)))

        yield make
