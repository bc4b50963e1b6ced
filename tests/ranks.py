"""Ranks of a training run without torchrun: forked from a server that has imported everything once.

Starting a rank the real way costs some 12 s of imports. Tests of what ranks do use this; tests of starting,
watching and stopping them use `launch`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.training.supervise import explain
from dflash_core.training.topology import make_layout

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["dflash_core.training.rank", "transformers.models.llama.modeling_llama", "torch.distributed.fsdp"]
)


def start_ranks(run_dir: Path, config: RunConfig) -> list[ForkServerProcess]:
    """All ranks of a run, started; what they print goes to `<run_dir>/console.txt`."""
    world = make_layout(config.training).world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for old in (run_dir / "ranks").glob("rank-*"):
        old.unlink()
    started = []
    for rank in range(world):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = _CONTEXT.Process(target=_rank, args=(run_dir, environment))
        process.start()
        started.append(process)
    return started


def _rank(run_dir: Path, environment: dict[str, object]) -> None:
    import torch

    torch.set_num_threads(1)
    console = os.open(run_dir / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(console, 1)
    os.dup2(console, 2)
    os.environ.update({name: str(value) for name, value in environment.items()})
    from dflash_core.training.__main__ import main

    code = main(run_dir / "run.json")
    sys.stdout.flush()
    os._exit(code)


def wait_for(processes: list[ForkServerProcess], seconds: float = 300.0) -> list[int | None]:
    """Exit codes. As under torchrun, the others are told to stop once one has failed."""
    for process in processes:
        process.join(seconds)
        if process.exitcode != 0:
            for other in processes:
                if other.is_alive():
                    other.terminate()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_ranks(run_dir: Path, config: RunConfig) -> None:
    """Train to the end.

    Raises:
        RuntimeError: with the message that `launch` would give.
    """
    (run_dir / "summary.json").unlink(missing_ok=True)
    codes = wait_for(start_ranks(run_dir, config))
    if any(codes) or not (run_dir / "summary.json").exists():
        raise RuntimeError(f"{explain(run_dir, codes[0])} (exit codes {codes})")


def console(run_dir: Path) -> str:
    """What the ranks have printed so far."""
    return (run_dir / "console.txt").read_text()
