"""Faults of a rank of `benchmarks.support.ranks`: functions of the rank's number, called before it starts."""

from __future__ import annotations

import itertools
import resource
import signal
from typing import Any


def small_files(rank: int, *, num_bytes: int) -> None:
    """Limit the size of this process's files: beyond it they raise an OSError, much as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def probed(rank: int) -> None:
    """Run the probe of the largest microbatches on a CPU as well."""
    from dflash_core.training import memory_probe

    memory_probe.has_fixed_memory = lambda device: True


def slow_clock(rank: int, *, seconds: float) -> None:
    """Replace the clock of `training.max_minutes` by one that moves by so many seconds at each reading."""
    from dflash_core.training import time_budget

    time_budget.now = map(seconds.__mul__, itertools.count()).__next__


def out_of_memory(rank: int, *, at: int, call: int, what: str = "train") -> None:
    """Raise the error of CUDA's allocator on rank `at`, in its call number `call` (from 0).

    Args:
        rank: of this process.
        at: the rank that runs out of memory.
        call: of the losses of training microbatches (`train`) or of the captures.
        what: `train` or `capture`.
    """
    import torch

    from dflash_core.target.capture import TargetCapture
    from dflash_core.training import loop

    if rank != at:
        return
    owner, name = {"train": (loop, "microbatch_loss"), "capture": (TargetCapture, "__call__")}[what]
    function, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return function(*arguments, **keywords)

    setattr(owner, name, counted)
