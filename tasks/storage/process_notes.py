"""Notes about processes, by which a later process recognises that an earlier one has ended.

A note holds host, pid and start time, so a reused pid is not mistaken for the process. Processes on other
machines cannot be checked from here and count as running.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """Return `host`, `pid` and `started` (seconds since 1970) of this process, as JSON types."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def is_gone(note: Mapping[str, Any]) -> bool:
    """Return whether the process of a note has ended.

    False for a process on another machine, which cannot be checked from here. A reused pid with another start
    time counts as ended.
    """
    if note["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(note["pid"]).create_time() - note["started"]) > 1.0
    except psutil.NoSuchProcess:
        return True
