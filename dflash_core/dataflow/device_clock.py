"""Seconds of work by kind, as the device spends them.

On a CPU a piece of work is over when its call returns. On CUDA the call only queues it, so a pair of events
is put around it on the current stream, and read once the device has passed both. Seconds of two streams that
overlap are counted in full for each: their sum then exceeds the wall time.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch


class DeviceClock:
    """Sums of seconds by kind, until they are taken."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Measure the body: one piece of work on the current stream."""
        if not self._on_cuda:
            started = time.monotonic()
            yield
            self.add(kind, time.monotonic() - started)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pending.append((kind, begin, end))

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds measured elsewhere, by the host or on another rank."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of completed work since the last call; never wait for the device."""
        for _ in range(len(self._pending)):
            kind, begin, end = self._pending.popleft()
            if end.query():
                self.add(kind, begin.elapsed_time(end) / 1e3)
            else:
                self._pending.append((kind, begin, end))
        taken, self._seconds = self._seconds, {}
        return taken
