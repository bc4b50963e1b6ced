"""Ranks of a training run without torchrun: forked from a server that has imported everything once.

Starting a rank the real way costs some 12 s of imports. Tests of what ranks do use this; tests of starting,
watching and stopping them use `launch`.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.launch.layout import make_layout
from dflash_core.launch.rank_status import explain

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "dflash_core.training.rank",
        "transformers.models.llama.modeling_llama",
        "torch.distributed.fsdp",
        "torch.distributed.run",
    ]
)


Fault = Callable[[int], None]


def start_ranks(run_dir: Path, config: RunConfig, fault: Fault | None = None) -> list[ForkServerProcess]:
    """All ranks of a run, started; what they print goes to `<run_dir>/console.txt`.

    `fault(rank)` is called in each process before anything else; see `tests/injected_faults.py`.
    """
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
        process = _CONTEXT.Process(target=_rank, args=(run_dir, environment, fault))
        process.start()
        started.append(process)
    return started


def _rank(run_dir: Path, environment: dict[str, object], fault: Fault | None) -> None:
    from dflash_core.training.__main__ import run_and_end

    os.environ.update({name: str(value) for name, value in environment.items()})
    _prepare(run_dir)
    if fault is not None:
        fault(int(os.environ["RANK"]))
    run_and_end(run_dir / "run.json")


def _prepare(run_dir: Path) -> None:
    import torch

    torch.set_num_threads(1)
    console = os.open(run_dir / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(console, 1)
    os.dup2(console, 2)


def wait_for(processes: list[ForkServerProcess], seconds: float = 300.0) -> list[int | None]:
    """Exit codes. As under torchrun, the others are told to stop once one has failed."""
    end, failed = time.monotonic() + seconds, False
    while living := [p for p in processes if p.exitcode is None]:
        if not multiprocessing.connection.wait([p.sentinel for p in living], end - time.monotonic()):
            break
        if not failed and any(p.exitcode for p in processes):
            failed = True
            for process in living:
                process.terminate()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_ranks(run_dir: Path, config: RunConfig, fault: Fault | None = None) -> None:
    """Train to the end.

    Raises:
        RuntimeError: with the message that `launch` would give.
    """
    (run_dir / "summary.json").unlink(missing_ok=True)
    codes = wait_for(start_ranks(run_dir, config, fault))
    if any(codes) or not (run_dir / "summary.json").exists():
        raise RuntimeError(f"{explain(run_dir, codes[0])} (exit codes {codes})")


def start_on_two_machines(run_dir: Path, config: RunConfig) -> None:
    """Two agents of torchrun, of one process each, that meet on loopback: torchrun's own parsing of the arguments that
    a node is started with, its rendezvous and its supervision, but ranks that are forked instead of started anew.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = [_CONTEXT.Process(target=_agent, args=(run_dir, config, node, endpoint)) for node in range(2)]
    for agent in agents:
        agent.start()
    codes = wait_for(agents)
    assert codes == [0, 0] and (run_dir / "summary.json").exists(), (codes, explain(run_dir, None))


def _agent(run_dir: Path, config: RunConfig, node: int, endpoint: str) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from dflash_core.launch.launcher import torchrun_arguments

    os.environ |= {"DFLASH_RDZV_ENDPOINT": endpoint, "LOGLEVEL": "CRITICAL"}
    arguments = torchrun_arguments(config.training, run_dir / "run.json", node_rank=node)
    settings, _, _ = config_from_args(parse_args(["--start-method", "fork", *arguments]))
    elastic_launch(settings, _rank_of_agent)(run_dir)


def _rank_of_agent(run_dir: Path) -> int:
    from dflash_core.training.__main__ import main

    _prepare(run_dir)
    if code := main(run_dir / "run.json"):
        raise RuntimeError(f"exit code {code}")
    return code


def console(run_dir: Path) -> str:
    """What the ranks have printed so far."""
    return (run_dir / "console.txt").read_text()
