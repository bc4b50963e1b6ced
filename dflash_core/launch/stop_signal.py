"""TODO."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

STOP_SECONDS = 15.0  # from SIGTERM to the end of a rank, checkpoint included


PEER_GRACE_SECONDS = 2.0  # between a peer's end and the signal that torchrun then sends here


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies; at once if it is dead already."""
    parent = os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent or parent == 1 and os.environ.get("TORCHELASTIC_RUN_ID"):
        os.kill(os.getpid(), signal.SIGTERM)


class StopSignal:
    """Set by SIGTERM. The process is ended `STOP_SECONDS` later if it is still there.

    Python runs signal handlers in the main thread only, which may be blocked in a collective; the wake-up
    descriptor is written by the C handler at once, and a thread waits on it.
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
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether the signal came, or comes within `seconds`: a peer that got it first may be gone
        already.
        """
        return self._event.wait(seconds)
