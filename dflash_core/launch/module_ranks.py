"""A module of this project on several ranks of this machine, from its start to its end.

For work that has no checkpoints: an interruption of the caller ends all ranks, as does the end of one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import psutil

from dflash_core.launch.stop_signal import known_parent

# From SIGTERM until a process that is still there is killed.
GRACE_SECONDS = 5.0


def run_ranks(module: str, arguments: list[str], num_ranks: int) -> int:
    """Run `python -m module arguments` under torchrun on this machine; return torchrun's exit code.

    The threads of the machine are shared out, where OMP_NUM_THREADS does not say otherwise.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    command = [sys.executable, "-m", "dflash_core.launch.launcher", "--standalone", "--max-restarts", "0"]
    command += ["--nproc-per-node", str(num_ranks), "--log-dir", os.devnull, "-m", module, *arguments]
    environment = {"LOGLEVEL": "CRITICAL", "OMP_NUM_THREADS": str(threads), **os.environ, **known_parent()}
    child = subprocess.Popen(command, env=environment, process_group=0)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            end_tree(child)


def end_tree(child: subprocess.Popen[bytes], *, grace_seconds: float = GRACE_SECONDS) -> None:
    """End a process and its descendants: SIGTERM to the process, which passes it on; then SIGKILL."""
    everyone = []
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    alive: list[psutil.Process] = []
    try:
        _, alive = psutil.wait_procs(everyone, timeout=grace_seconds)
    finally:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.kill()
        child.wait()
