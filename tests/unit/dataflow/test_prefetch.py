"""Order, errors and the bound of items prepared ahead."""

from __future__ import annotations

import threading

import pytest

from dflash_core.dataflow.assignment import (
    Assignment,
)
from dflash_core.dataflow.prefetch import Prefetcher
from dflash_core.errors import UserError


def test_the_prefetcher_keeps_order_and_raises_errors_of_its_thread() -> None:
    items = [Assignment(0, i, 0, i, 0, 0) for i in range(20)]
    feed = Prefetcher(iter(items), lambda a: a.slot * 2, depth=3)
    assert [(a.slot, value) for a, value in feed] == [(i, 2 * i) for i in range(20)]

    def fails(assignment: Assignment) -> int:
        if assignment.slot == 2:
            raise UserError("tokens.bin: cut short")
        return 0

    broken = Prefetcher(iter(items), fails, depth=3)
    next(broken), next(broken)
    with pytest.raises(UserError, match="cut short"):
        next(broken)
    broken.close()


def test_the_prefetcher_runs_ahead_only_so_far_and_stops_when_closed() -> None:
    threads_before, prepared = threading.active_count(), []
    items = (Assignment(0, i, 0, i, 0, 0) for i in range(10**9))
    feed = Prefetcher(items, lambda a: prepared.append(a.slot), depth=2)
    next(feed)
    feed.close()
    assert len(prepared) <= 1 + 2 + 2  # taken, queued, one to be queued, one being prepared
    assert threading.active_count() == threads_before
