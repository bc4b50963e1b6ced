"""Ranks of a training run without torchrun: forked from a server that has imported everything once.

A rank started by torchrun spends some 12 s on imports. Tests of the work of ranks use this; tests of
starting, watching and stopping them use `launch`.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.launch.layout import make_layout
from dflash_core.launch.rank_status import explain
from dflash_core.launch.stop_signal import StopSignal, end_with_parent

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
    """Start all ranks of a run; their output goes to `<run_dir>/console.txt`.

    `fault(rank)` is called in each process before anything else, for instance `slow_work`.
    """
    world_size = make_layout(config.training).world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for old in (run_dir / "ranks").glob("rank-*"):
        old.unlink()
    started = []
    for rank in range(world_size):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = _CONTEXT.Process(target=_rank, args=(run_dir, environment, fault))
        process.start()
        started.append(process)
    return started


def _rank(run_dir: Path, environment: dict[str, object], fault: Fault | None) -> None:
    from dflash_core.training.rank import run_and_exit

    stop = StopSignal()
    end_with_parent()
    os.environ.update({name: str(value) for name, value in environment.items()})
    _prepare(run_dir)
    if fault is not None:
        fault(int(os.environ["RANK"]))
    run_and_exit(run_dir / "run.json", stop)


def _prepare(run_dir: Path) -> None:
    import torch

    torch.set_num_threads(1)
    console = os.open(run_dir / "console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(console, 1)
    os.dup2(console, 2)


def wait_for(processes: list[ForkServerProcess], seconds: float = 300.0) -> list[int | None]:
    """Return the exit codes; as under torchrun, SIGTERM stops the others once one has failed."""
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
        RuntimeError: the run failed; with the message that `launch` would give.
    """
    (run_dir / "summary.json").unlink(missing_ok=True)
    codes = wait_for(start_ranks(run_dir, config, fault))
    if any(codes) or not (run_dir / "summary.json").exists():
        raise RuntimeError(f"{explain(run_dir, codes[0])} (exit codes {codes})")


def start_on_two_machines(run_dir: Path, config: RunConfig) -> None:
    """Train with two agents of torchrun on loopback, one process each.

    Argument parsing, rendezvous and supervision are torchrun's; the ranks are forked instead of started anew.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = [_CONTEXT.Process(target=_agent, args=(run_dir, config, node, endpoint)) for node in range(2)]
    for agent in agents:
        agent.start()
    codes = wait_for(agents)
    assert codes == [0, 0], (codes, explain(run_dir, None))
    assert (run_dir / "summary.json").exists(), explain(run_dir, None)


def _agent(run_dir: Path, config: RunConfig, node: int, endpoint: str) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from dflash_core.launch.launcher import torchrun_arguments

    os.environ |= {"DFLASH_RDZV_ENDPOINT": endpoint, "LOGLEVEL": "CRITICAL"}
    arguments = torchrun_arguments(config.training, run_dir / "run.json", node_rank=node)
    settings, _, _ = config_from_args(parse_args(["--start-method", "fork", *arguments]))
    elastic_launch(settings, _rank_of_agent)(run_dir)


def _rank_of_agent(run_dir: Path) -> int:
    from dflash_core.training.rank import main

    stop = StopSignal()
    end_with_parent()
    _prepare(run_dir)
    if code := main(run_dir / "run.json", stop):
        raise RuntimeError(f"exit code {code}")
    return code


def console(run_dir: Path) -> str:
    """Return the output of the ranks so far."""
    return (run_dir / "console.txt").read_text()


def slow_work(rank: int, *, seconds: dict[str, float]) -> None:
    """Make captures and training passes take at least `seconds` per token (`capture`, `train`)."""
    from dflash_core.target.capture import TargetCapture
    from dflash_core.training import loop

    for owner, name, kind in ((TargetCapture, "__call__", "capture"), (loop, "microbatch_loss", "train")):
        setattr(owner, name, _slowed(getattr(owner, name), seconds[kind]))


def _slowed(function: Any, seconds_per_token: float) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        started = time.monotonic()
        result = function(*arguments, **keywords)
        microbatch = next(a for a in arguments if hasattr(a, "token_ids"))
        time.sleep(max(0.0, started + microbatch.num_tokens * seconds_per_token - time.monotonic()))
        return result

    return call
