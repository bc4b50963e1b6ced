"""Faults that a rank of `tests.ranks` brings with it: functions of the rank, called before it starts."""

from __future__ import annotations

import resource
import signal
import time
from typing import Any


def small_files(rank: int, *, num_bytes: int) -> None:
    """Files of this process stop growing there with an OSError, much as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def probed(rank: int) -> None:
    """The probe of the largest microbatches runs on a CPU as well."""
    from dflash_core.training import memory_probe as probe

    probe.has_fixed_memory = lambda device: True


def out_of_memory(rank: int, *, at: int, call: int, what: str = "train") -> None:
    """On rank `at`, the call with that number (from 0) of what this rank does raises what CUDA's allocator raises.

    Args:
        what: `train` (losses, validation included) or `capture`.
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


def slow_work(rank: int, *, seconds: dict[str, float]) -> None:
    """Captures and training passes that take so many seconds a token (`capture`, `train`), no less."""
    from dflash_core.target.capture import TargetCapture
    from dflash_core.training import loop

    for owner, name, kind in ((TargetCapture, "__call__", "capture"), (loop, "microbatch_loss", "train")):
        setattr(owner, name, _slowed(getattr(owner, name), seconds[kind]))


def _slowed(function: Any, seconds_per_token: float) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        started = time.monotonic()
        result = function(*arguments, **keywords)
        microbatch = next(a for a in arguments if hasattr(a, "token_ids"))
        if keywords.get("backward", True):  # validation is not slowed
            time.sleep(max(0.0, started + microbatch.num_tokens * seconds_per_token - time.monotonic()))
        return result

    return call
