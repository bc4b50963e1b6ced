"""Compiled loops over disjoint ranges, one thread per core; the number of cores does not change results."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_SMALL = 200_000  # elements: below, starting threads costs more than it saves
_MAX_THREADS = 8  # the loops are bound by memory, which more cores share


def on_all_cores(n: int, num_elements: int, run: Callable[[int, int], None]) -> None:
    """Call run(first, last) for ranges that cover 0..n once.

    Args:
        n: number of elements, or of groups of them, to divide.
        num_elements: amount of work.
        run: a compiled function that releases the GIL (`nogil=True`) and writes only inside its range.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, _MAX_THREADS)
    if num_elements < _SMALL or cores == 1:
        run(0, n)
        return
    bounds = [n * i // cores for i in range(cores + 1)]
    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(run, bounds[:-1], bounds[1:]))
