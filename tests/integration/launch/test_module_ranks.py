"""Processes of a module on several ranks: none is left behind."""

from __future__ import annotations

import subprocess
import sys

import psutil

from dflash_core.launch.module_ranks import end_tree

# Starts a child that ignores SIGTERM, prints its pid, and waits.
PARENT = """
import subprocess, sys, time
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
wait = "print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore + wait], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_tree_of_processes_ends_even_where_one_ignores_the_signal() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    grandchild = psutil.Process(int(parent.stdout.readline()))
    end_tree(parent, grace_seconds=0.2)
    parent.stdout.close()
    assert parent.returncode is not None
    grandchild.wait(30)
    assert not grandchild.is_running()
