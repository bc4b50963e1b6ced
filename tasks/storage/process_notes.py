"""Notes about processes, by which a later process tells that one is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import psutil


def this_process() -> dict[str, Any]:
    """`host`, `pid` and `started` (seconds since 1970) of this process, as JSON types."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def is_gone(note: Mapping[str, Any]) -> bool:
    """Whether the process of a note has ended; False for one of another machine, of which nobody here can tell.

    A process of the same number that started at another time is another one.
    """
    if note["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(note["pid"]).create_time() - note["started"]) > 1.0
    except psutil.NoSuchProcess:
        return True
