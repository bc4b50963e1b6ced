"""Compiled loops over disjoint ranges, one thread a core: what they write does not depend on how many there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_SMALL = 200_000  # elements: below, starting threads costs more than it saves
_MOST = 8  # threads: the loops wait for memory, which more cores share


def on_all_cores(n: int, num_elements: int, run: Callable[[int, int], None]) -> None:
    """Calls run(first, last) for ranges that cover 0..n once.

    Args:
        n: what is divided: elements, or groups of them.
        num_elements: how much work there is.
        run: a compiled function that releases the GIL (`nogil=True`) and writes to places of its range alone.
    """
    cores = min(
        _MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if num_elements < _SMALL or cores == 1:
        run(0, n)
        return
    bounds = [n * i // cores for i in range(cores + 1)]
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(run, bounds[:-1], bounds[1:]))
