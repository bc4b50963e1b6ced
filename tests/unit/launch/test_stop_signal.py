"""A process ends with the one that started it, also where that one ended before it could ask for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Its parent has ended when it asks to end with it; `blocked` cannot be ended by SIGTERM.
CHILD = """
import os, signal, sys, time
from dflash_core.launch.stop_signal import PARENT, end_with_parent
def ended(number, frame):
    print("terminated", flush=True)
    if "blocked" not in sys.argv: sys.exit()
signal.signal(signal.SIGTERM, ended)
while os.getppid() == int(os.environ[PARENT]):
    time.sleep(0.01)
end_with_parent(0.1)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys
from dflash_core.launch.stop_signal import known_parent
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=os.environ | known_parent())
"""


def test_a_child_ends_whose_parent_ended_first() -> None:
    """The pipe is closed when the child has ended, and not before."""
    for words in ([], ["blocked"]):
        command = [sys.executable, "-c", PARENT, CHILD, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0
        assert done.stdout == "terminated\n"
        assert done.stderr == ""
