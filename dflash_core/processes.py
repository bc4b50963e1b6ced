"""Processes that can be recognised later: by host, pid and the time of their start.

The time of the start is counted from the boot, in the kernel's ticks, so that neither a clock that is set nor
a pid that is used again makes one process look like another. Without /proc it is the system's time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def start_of(pid: int) -> str | None:
    """Return the boot and the time at which a process of this machine started; None where there is none."""
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            # The name in parentheses may hold blanks and parentheses; field 3 is the state, 22 the start.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # It has ended, and nobody has asked for its exit code.
            if fields[0] in "ZX":
                return None
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {fields[19]}"
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{psutil.Process(pid).create_time():.0f}"
    return None


def this_process() -> dict[str, Any]:
    """Return `host`, `pid` and `started` of this process, as JSON types."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": start_of(os.getpid())}


def is_gone(note: Mapping[str, Any]) -> bool:
    """Return whether the process of a note has ended.

    False for a process on another machine, which cannot be checked from here. A reused pid with another start
    counts as ended.
    """
    return note["host"] == socket.gethostname() and start_of(note["pid"]) != note["started"]
