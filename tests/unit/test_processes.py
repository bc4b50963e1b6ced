"""Processes are recognised, whatever the clock shows and however they ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from dflash_core.processes import is_gone, start_of, this_process


def test_a_process_is_itself_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    note = this_process()
    assert not is_gone(note)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert this_process() == note
    assert is_gone(note | {"started": "another start"})
    assert not is_gone(note | {"started": "another start", "host": "another machine"})


def test_a_process_that_nobody_has_waited_for_has_ended() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    note = this_process() | {"pid": child.pid, "started": start_of(child.pid)}
    assert not is_gone(note)
    os.kill(child.pid, 9)
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert is_gone(note)
    child.communicate()
    assert is_gone(note)
