"""A rank ends in time after SIGTERM even if its main thread is blocked."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = """
import threading
from dflash_core.launch import stop_signal
stop_signal.STOP_SECONDS = 0.3
stop = stop_signal.StopSignal()
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_rank_whose_main_thread_is_blocked_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    child = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    _, errors = child.communicate(timeout=600)
    assert child.returncode == 128 + signal.SIGTERM
    assert "the last complete checkpoint stands" in errors
