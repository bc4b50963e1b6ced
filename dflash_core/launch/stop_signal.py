"""Stop requests to a rank: SIGTERM, noticed at once even while the main thread is blocked in a collective.

A rank ends with its parent (Linux PR_SET_PDEATHSIG) and within `STOP_SECONDS` of SIGTERM: the loop checks
the signal between microbatches and saves a checkpoint; a rank that is still there after that time exits
without one, and the last complete checkpoint stays valid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

STOP_SECONDS = 15.0  # from SIGTERM to the end of a rank, checkpoint included
# Variable with the pid of the process that started this one.
PARENT = "DFLASH_PARENT"
PEER_GRACE_SECONDS = 2.0  # from a peer's end until torchrun's signal arrives here


def known_parent() -> dict[str, str]:
    """Return the variable by which a child recognises this process as its parent (`end_with_parent`)."""
    return {PARENT: str(os.getpid())}


def end_with_parent(limit_seconds: float | None = None) -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; at once if it is already dead.

    A parent that died while this process was starting is recognised by its pid, which `known_parent` passes
    on: afterwards another process is the parent, and not always process 1.

    Args:
        limit_seconds: this process exits so long after its parent, should SIGTERM not have ended it; None:
            `StopSignal` sees to that.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if limit_seconds is not None:
        arguments = (parent, limit_seconds)
        threading.Thread(target=_outlive, args=arguments, daemon=True, name="parent").start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _outlive(parent: int, seconds: float) -> None:
    """Exit `seconds` after the end of the parent."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(seconds)
    os._exit(128 + signal.SIGTERM)


class StopSignal:
    """An event that SIGTERM sets; `STOP_SECONDS` later the process exits if it is still running.

    Python runs signal handlers in the main thread only, which may be blocked in a collective; the C handler
    writes the wake-up descriptor at once, and a thread waits on it.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="stop-signal").start()

    def _watch(self) -> None:
        while signal.SIGTERM not in os.read(self._read, 64):
            pass
        self._event.set()
        time.sleep(STOP_SECONDS)
        print("not stopped in time, ending: the last complete checkpoint stands", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGTERM)

    def is_set(self) -> bool:
        """Return True once the signal has arrived."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the signal, which a peer may have received first; return `is_set`."""
        return self._event.wait(seconds)
