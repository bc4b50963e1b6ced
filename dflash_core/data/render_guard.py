"""The process that ends another one whose rendering exceeds a limit; see `render_limits.py`.

    python render_guard.py FILE_DESCRIPTOR PROCESS SECONDS BYTES

Reads the names of templates, one JSON mapping from slot to name per line, and ends with its input. It imports
nothing of this project, so it starts within a few hundredths of a second.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NUM_SLOTS = 1024
_POLL_SECONDS = 0.1


class Growth:
    """Time and memory of renderings, from the first look at each on.

    Args:
        process: number of the process that renders.
        max_seconds, max_bytes: limits of one rendering.
    """

    def __init__(self, process: int, max_seconds: float, max_bytes: float) -> None:
        self.process, self.max_seconds, self.max_bytes = process, max_seconds, max_bytes
        # Of each slot: start, memory at the first look, limit on its growth.
        self._seen: dict[int, tuple[float, int, float]] = {}

    def problems(self, started: Sequence[float]) -> Iterator[tuple[int, str]]:
        """Yield each slot whose rendering exceeds a limit, with the limit."""
        if not any(started):
            return
        now, memory = time.monotonic(), resident_bytes(self.process)
        for slot in [i for i, start in enumerate(started) if start]:
            start = started[slot]
            if slot not in self._seen or self._seen[slot][0] != start:
                self._seen[slot] = start, memory, min(self.max_bytes, free_bytes() / 2)
            _, before, limit = self._seen[slot]
            if start and now - start > self.max_seconds:
                yield slot, f"renders one conversation for more than {self.max_seconds:g} s"
            elif memory - before > limit:
                yield slot, f"takes more than {limit / 1e9:.1f} GB of memory for one conversation"


def resident_bytes(process: int) -> int:
    """Return the memory of a process, 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> float:
    """Return the memory that is available on this machine, infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return float("inf")


def main(descriptor: int, process: int, max_seconds: float, max_bytes: float) -> None:
    """Watch until the input ends or a limit is exceeded."""
    started = memoryview(mmap.mmap(descriptor, 8 * NUM_SLOTS)).cast("d")
    growth, text = Growth(process, max_seconds, max_bytes), b""
    names: dict[str, str] = {}
    while True:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            names = json.loads(lines[-1]) if lines else names
        for slot, problem in growth.problems(started):
            name = names.get(str(slot), "the chat template")
            message = (
                f"data.chat_template: {name} {problem} and does not stop; process {process} was killed\n"
            )
            sys.stderr.write(message)
            sys.stderr.flush()
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
