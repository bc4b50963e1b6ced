"""Start of torchrun as a child: its ranks are watched, metrics are forwarded, no process is left behind.

`launch` is a plain function: the Prefect task calls it, tests call it. Stopping (an exception in the caller,
SIGTERM turned into one, Ctrl-C, a stall) goes TERM -> up to 20 s -> KILL for every rank by the pids they
wrote -> KILL for torchrun, under 28 s in all. Each rank is in its own session, so a signal to this process's
group does not reach it; torchrun forwards TERM. If this process is killed, the kernel sends TERM to torchrun,
and torchrun's end sends TERM to the ranks.

Run as a module, this file is torchrun with that parent-death signal: `python -m dflash_core.launch.launcher
--standalone --nproc-per-node 2 -m dflash_core.training.rank run.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from dflash_core.config import RunConfig, TrainingConfig
from dflash_core.errors import RunFailed, UserError
from dflash_core.launch.layout import ranks_per_node
from dflash_core.launch.metrics_forwarder import MetricsForwarder, OnMetrics
from dflash_core.launch.rank_status import START_PHASES, explain, read_errors, read_records
from dflash_core.launch.stop_signal import end_with_parent, known_parent
from dflash_core.processes import is_gone
from dflash_core.redaction import redact
from dflash_core.references import secret_value

RANK_MODULE = "dflash_core.training.rank"
# Part of the commands for other machines where they are set here.
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
TERMINATE_SECONDS = 20.0  # from SIGTERM until ranks are killed
TORCHRUN_SECONDS = 3.0  # from then until torchrun is killed
POLL_SECONDS = 0.25
START_SECONDS = 900.0  # a large target may load for long, and no phase changes meanwhile


class TrainingFailed(RuntimeError):
    """The run ended before its last step; the message names the rank and the cause.

    Args:
        again: another launch may get further. False after `RunFailed` on a rank (memory, steps that are not
            finite), which would repeat.
    """

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


def torchrun_arguments(
    training: TrainingConfig, run_json: Path, *, node_rank: int | None = None
) -> list[str]:
    """Return a node's arguments of torch.distributed.run (a single node needs no rendezvous address)."""
    ranks = ["--nproc-per-node", str(ranks_per_node(training)), "--max-restarts", "0"]
    # Ranks report in the run's directory; torchrun would leave an empty log directory behind.
    ranks += ["--log-dir", os.devnull]
    if training.num_nodes == 1:
        rendezvous = ["--standalone"]
    else:
        rendezvous = ["--nnodes", str(training.num_nodes), "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-endpoint", os.environ.get("DFLASH_RDZV_ENDPOINT", "HOST_OF_NODE_0:29500")]
        rendezvous += ["--rdzv-id", run_json.parent.name]
        if node_rank is not None:
            rendezvous += ["--node-rank", str(node_rank)]
    return [*rendezvous, *ranks, "-m", RANK_MODULE, str(run_json)]


def node_commands(training: TrainingConfig, run_json: Path) -> list[str]:
    """Return the shell command to run on each node, for `training.launcher: external`."""
    interfaces = [f"{name}={shlex.quote(os.environ[name])}" for name in INTERFACES if name in os.environ]
    return [
        f"cd {shlex.quote(os.getcwd())} && "
        + " ".join([*interfaces, *map(shlex.quote, [sys.executable, "-m", "torch.distributed.run"])])
        + " "
        + shlex.join(torchrun_arguments(training, run_json, node_rank=node))
        for node in range(training.num_nodes)
    ]


def launch(
    run_dir: Path | str,
    config: RunConfig,
    on_metrics: OnMetrics | None = None,
    *,
    metrics_grace_seconds: float = 120.0,
) -> dict[str, Any]:
    """Train the run described by `<run_dir>/run.json` to its end; return its `summary.json`.

    The run resumes from its newest complete checkpoint, so a retry is simply another call.

    Args:
        run_dir: directory of one run.
        config: the configuration that run.json holds; only its `training` section is read here.
        on_metrics: called in a thread with lists of new lines of metrics.jsonl, in order.
        metrics_grace_seconds: limit for sending the remaining metrics after the end of training.

    Raises:
        UserError: a user's mistake that a rank reported.
        TrainingFailed: anything else; the message names rank, phase and cause.
    """
    run_dir, training = Path(run_dir), config.training
    if training.launcher == "local":
        stop(run_dir, None)  # ranks of a killed launch may still be saving
    summary = run_dir / "summary.json"
    for old in [*(run_dir / "ranks").glob("rank-*"), summary]:
        old.unlink(missing_ok=True)
    forwarder = MetricsForwarder(run_dir, on_metrics) if on_metrics else None
    child = start(run_dir, training)
    failure: Exception | None = None
    try:
        watch(run_dir, training, child, summary)
    except TrainingFailed as stalled:
        failure = stalled
    finally:
        # Reached on every way out: KeyboardInterrupt, the exception that a flow engine makes of SIGTERM.
        stop(run_dir, child)
        grace = metrics_grace_seconds if summary.exists() else 3.0
        unsent = forwarder.finish(grace) if forwarder else None
    if failure is None and not summary.exists():  # known after `stop`: ranks may outlive torchrun by a moment
        message, errors = explain(run_dir, child.returncode if child else None), read_errors(run_dir)
        if any(e["user_error"] for e in errors):
            failure = UserError(message)
        else:
            failure = TrainingFailed(message, again=all(e["type"] != RunFailed.__name__ for e in errors))
    if unsent:
        print(unsent, flush=True)
    if failure is not None:
        notify(training.on_failure, run_dir, str(failure))
        raise failure
    return dict(json.loads(summary.read_text()))


def start(run_dir: Path, training: TrainingConfig) -> subprocess.Popen[bytes] | None:
    """Start torchrun in its own process group; with the external launcher print commands, return None."""
    run_json = run_dir / "run.json"
    if training.launcher == "external":
        commands = node_commands(training, run_json)
        (run_dir / "commands.txt").write_text("\n".join(commands) + "\n")
        title = "start these commands, one on each node (also in commands.txt):"
        print(title, *commands, sep="\n  ", flush=True)
        return None
    command = [sys.executable, "-m", "dflash_core.launch.launcher", *torchrun_arguments(training, run_json)]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node(training))
    # Segments that grow: microbatches of many sizes would leave gaps that nothing fits into.
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
        **known_parent(),
    }
    return subprocess.Popen(command, env=environment, process_group=0)


def watch(
    run_dir: Path, training: TrainingConfig, child: subprocess.Popen[bytes] | None, summary: Path
) -> None:
    """Wait until the ranks are gone (or, started elsewhere, have finished or failed).

    The seconds without progress are those that this function has waited: a clock that is set, a machine that
    sleeps, or a process that is stopped together with its ranks adds none.

    Raises:
        TrainingFailed: no rank changed its phase for `stall_seconds`; stacks of all local ranks are written.
    """
    idle_seconds, unlooked_seconds, progress = 0.0, 0.0, list[tuple[Any, ...]]()
    while child.poll() is None if child else not (summary.exists() or read_errors(run_dir)):
        time.sleep(POLL_SECONDS)
        unlooked_seconds += POLL_SECONDS
        if unlooked_seconds < min(5.0, training.stall_seconds / 4):
            continue
        idle_seconds, unlooked_seconds = idle_seconds + unlooked_seconds, 0.0
        everyone = read_records(run_dir)  # finished ranks count as well: torchrun ends a moment later
        records = [r for r in everyone if r["status"] == "running"]
        before, progress = progress, [(r["rank"], r["pid"], r["since"]) for r in everyone]
        if progress != before or not (child or everyone):
            idle_seconds = 0.0
        running = records and all(r["phase"] not in START_PHASES for r in records)
        limit = training.stall_seconds if running else max(training.stall_seconds, START_SECONDS)
        if idle_seconds > limit:
            raise TrainingFailed(describe_stall(run_dir, records, idle_seconds))


def describe_stall(run_dir: Path, records: list[dict[str, Any]], idle_seconds: float) -> str:
    """Dump the stacks of the local ranks; return a message that names the rank the others wait for."""
    if not records:
        return "stall: no rank has started; is the rendezvous reachable?"
    for record in records:
        for process in _local_processes([record]):
            process.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    # A rank that works blocks those that wait, even if it is ahead of them: the drafter of step 7 waits for a
    # target that hangs in its capture for step 8. A process that the system has stopped comes first.
    stopped = {p.pid for p in _local_processes(records) if p.status() == psutil.STATUS_STOPPED}

    def progress(record: dict[str, Any]) -> tuple[bool, bool, int, int]:
        waits = record["phase"].startswith("wait")
        return record["pid"] not in stopped, waits, record["step"], record["microbatch"]

    slowest, since = min(records, key=progress), max(r["since"] for r in records)
    slowest_seconds = idle_seconds + since - slowest["since"]
    return (
        f"stall: no rank has moved for {idle_seconds:.0f} s (training.stall_seconds); slowest: rank "
        f"{slowest['rank']} ({slowest['role']}, pid {slowest['pid']} on {slowest['host']}) in phase "
        f"'{slowest['phase']}' of step {slowest['step']} for {slowest_seconds:.0f} s; stacks of "
        f"all ranks in {run_dir / 'ranks'}/rank-*.stacks; the run was ended and resumes from the newest "
        "complete checkpoint"
    )


def stop(run_dir: Path, child: subprocess.Popen[bytes] | None) -> None:
    """End torchrun and all ranks on this machine: TERM, `TERMINATE_SECONDS` of grace, KILL. Idempotent."""
    processes = {p.pid: p for p in _local_processes(read_records(run_dir))}
    if child is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(child.pid)
            processes |= {p.pid: p for p in tree.children(recursive=True)}
        if child.poll() is None:
            child.terminate()
    elif not processes:
        return
    everyone = list(processes.values())
    try:
        _, alive = psutil.wait_procs(everyone, timeout=TERMINATE_SECONDS)
    except BaseException:  # a second Ctrl-C: no more waiting
        alive = everyone
        raise
    finally:
        # torchrun goes last: it must not react to dead ranks while the others are being killed.
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if child is not None:
            try:
                child.wait(timeout=TORCHRUN_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _local_processes(records: list[dict[str, Any]]) -> list[psutil.Process]:
    """Return the living rank processes of this machine, without pids that now belong to another process."""
    processes = []
    for record in records:
        if record["host"] == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record["pid"])
                if not is_gone(record) and RANK_MODULE in process.cmdline():
                    processes.append(process)
    return processes


def notify(hook: str | None, run_dir: Path, message: str) -> None:
    """Call `training.on_failure`: POST JSON to a URL, or run a command with DFLASH_RUN and DFLASH_MESSAGE.

    A broken hook is printed, and does not replace the failure it reports.
    """
    if hook is None:
        return
    setting = hook
    try:
        hook = secret_value(setting, "training.on_failure")
        if hook.startswith(("http://", "https://")):
            body = json.dumps({"run": str(run_dir), "message": message}).encode()
            request = urllib.request.Request(hook, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
        else:
            variables = {**os.environ, "DFLASH_RUN": str(run_dir), "DFLASH_MESSAGE": message}
            subprocess.run(hook, shell=True, timeout=30, check=True, env=variables)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(redact(f"training.on_failure: {setting!r} failed: {error}"), flush=True)


def main(arguments: list[str]) -> int:
    """Run torchrun so that it ends with its parent and prints no tracebacks; return its exit code."""
    end_with_parent(TERMINATE_SECONDS)
    os.environ |= {"LOGLEVEL": "CRITICAL", **known_parent()}  # for torchrun, for the ranks
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its log of each rank's exit: our one message names the cause. Single modules read LOGLEVEL.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(arguments)
    except ChildFailedError:
        return 1
    except SignalException as received:
        return 128 + int(received.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
