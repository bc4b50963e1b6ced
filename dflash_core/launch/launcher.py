"""Starts torchrun as a child, watches it, hands on its metrics, and leaves no process behind.

`launch` is a plain function: the Prefect task calls it, tests call it. Stopping (an exception in the caller,
SIGTERM turned into one, Ctrl-C, a stall) goes TERM -> up to 20 s -> KILL for every rank by the pids they
wrote -> KILL for torchrun, under 28 s in all. Ranks sit in sessions of their own, so a signal to this
process's group does not reach them; torchrun hands TERM on. If this process is killed outright, the kernel
sends TERM to torchrun, and torchrun's end sends TERM to the ranks.

Run as a module, this file is torchrun with that parent-death signal: `python -m dflash_core.launch.launcher
--standalone --nproc-per-node 2 -m dflash_core.training run.json`.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from dflash_core.config import RunConfig, TrainingConfig
from dflash_core.errors import RunFailed, UserError
from dflash_core.launch.layout import ranks_per_node
from dflash_core.launch.rank_status import START_PHASES, explain, read_records, read_reports
from dflash_core.launch.stop_signal import end_with_parent

TERMINATE_SECONDS = 20.0  # from SIGTERM until ranks are killed
TORCHRUN_SECONDS = 3.0  # from then until torchrun is killed
POLL_SECONDS = 0.25
START_SECONDS = 900.0  # a large target may load for long, and no phase changes meanwhile

OnMetrics = Callable[[list[dict[str, Any]]], None]


class TrainingFailed(RuntimeError):
    """The run ended before its last step. The message names the rank and the cause.

    `again`: another launch may well get further. Not so where a rank gave up on the run itself (memory, steps that
    are not finite): it would do so again.
    """

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.again = again


class MetricsForwarder:
    """Tails `metrics.jsonl` in a thread and hands new lines to a callback, in order.

    A callback that raises gets the same lines again later, with growing pauses: a tracking server that is
    away for a while loses nothing. `metrics.forwarded.json` records what was accepted, so a step that is
    repeated after a resume is not sent twice; only lines accepted in the instant before a kill can be sent
    again, with equal step and time.
    """

    def __init__(self, run_dir: Path, on_metrics: OnMetrics) -> None:
        self.path, self.marker = run_dir / "metrics.jsonl", run_dir / "metrics.forwarded.json"
        self.on_metrics = on_metrics
        self.error: Exception | None = None
        self._sent: dict[str, int] = json.loads(self.marker.read_text()) if self.marker.exists() else {}
        self._offset, self._inode = 0, -1
        self._done = threading.Event()
        context = contextvars.copy_context()  # the caller's loggers work in the thread as well
        self._thread = threading.Thread(target=lambda: context.run(self._run), daemon=True, name="metrics")
        self._thread.start()

    def _run(self) -> None:
        pause = POLL_SECONDS
        while True:
            finishing = self._done.is_set()
            try:
                self._forward()
                pause, self.error = POLL_SECONDS, None
            except Exception as error:
                if self.error is None:
                    print(f"metrics are kept and sent later: {type(error).__name__}: {error}", flush=True)
                pause, self.error = min(10.0, pause * 2), error
            if finishing and self.error is None:
                return
            self._done.wait(pause) if not finishing else time.sleep(min(pause, 1.0))

    def _forward(self) -> None:
        """Send what is new; the offset moves only after the callback has returned."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return
        if (
            stat.st_ino != self._inode or stat.st_size < self._offset
        ):  # cut by a resume, which writes a new file
            self._offset, self._inode = 0, stat.st_ino
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        chunk = chunk[: chunk.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in chunk.splitlines()]
        fresh = [line for line in lines if line["step"] > self._sent.get(kind_of(line), -1)]
        if fresh:
            self.on_metrics(fresh)
            for line in fresh:
                self._sent[kind_of(line)] = line["step"]
            partial = self.marker.with_suffix(".tmp")
            partial.write_text(json.dumps(self._sent))
            os.replace(partial, self.marker)
        self._offset += len(chunk)

    def finish(self, seconds: float) -> str | None:
        """Send the rest, for at most `seconds`; returns what is still unsent and why, or None."""
        self._done.set()
        self._thread.join(seconds)
        if not self._thread.is_alive() or self.error is None:
            return None
        return f"metrics in {self.path} after {self._sent} were not accepted: {self.error}"


def kind_of(line: dict[str, Any]) -> str:
    """Lines of a step come in two kinds, with steps that rise within each."""
    return "validation" if any(name.startswith("validation/") for name in line) else "train"


def torchrun_arguments(
    training: TrainingConfig, run_json: Path, *, node_rank: int | None = None
) -> list[str]:
    """Arguments of torch.distributed.run for this node (a single node needs no rendezvous address)."""
    ranks = ["--nproc-per-node", str(ranks_per_node(training)), "--max-restarts", "0"]
    # ranks report in the run's directory; torchrun would leave an empty one of its own behind
    ranks += ["--log-dir", os.devnull]
    if training.num_nodes == 1:
        where = ["--standalone"]
    else:
        where = ["--nnodes", str(training.num_nodes), "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", os.environ.get("DFLASH_RDZV_ENDPOINT", "HOST_OF_NODE_0:29500")]
        where += ["--rdzv-id", run_json.parent.name]
        if node_rank is not None:
            where += ["--node-rank", str(node_rank)]
    return [*where, *ranks, "-m", "dflash_core.training", str(run_json)]


def node_commands(training: TrainingConfig, run_json: Path) -> list[str]:
    """The command to run on each node, for `training.launcher: external`."""
    return [
        " ".join(["python -m torch.distributed.run", *torchrun_arguments(training, run_json, node_rank=node)])
        for node in range(training.num_nodes)
    ]


def launch(
    run_dir: Path | str,
    config: RunConfig,
    on_metrics: OnMetrics | None = None,
    *,
    metrics_grace_seconds: float = 120.0,
) -> dict[str, Any]:
    """Train the run described by `<run_dir>/run.json` to its end; returns its `summary.json`.

    The run resumes from its newest complete checkpoint, so calling again after a failure is all a retry
    needs.

    Args:
        run_dir: directory of one run.
        config: the configuration that run.json holds; only its `training` section is read here.
        on_metrics: called in a thread with lists of new lines of metrics.jsonl, in order.
        metrics_grace_seconds: how long to go on sending metrics after the end of training.

    Raises:
        UserError: a mistake that a rank found.
        TrainingFailed: anything else; the message names rank, phase and cause.
    """
    run_dir, training = Path(run_dir), config.training
    if training.launcher == "local":  # ranks of a launch that was killed may still be saving: one at a time
        stop(run_dir, None)
    summary = run_dir / "summary.json"
    for old in [*(run_dir / "ranks").glob("rank-*"), summary]:
        old.unlink(missing_ok=True)
    forwarder = MetricsForwarder(run_dir, on_metrics) if on_metrics else None
    child = _start(run_dir, training)
    failure: Exception | None = None
    try:
        _watch(run_dir, training, child, summary)
    except TrainingFailed as stalled:
        failure = stalled
    finally:
        # Reached on every way out: KeyboardInterrupt, the exception that a flow engine makes of SIGTERM.
        stop(run_dir, child)
        grace = metrics_grace_seconds if summary.exists() else 3.0
        unsent = forwarder.finish(grace) if forwarder else None
    if failure is None and not summary.exists():  # known after `stop`: ranks may outlive torchrun a moment
        message, reports = explain(run_dir, child.returncode if child else None), read_reports(run_dir)
        if any(r["user_error"] for r in reports):
            failure = UserError(message)
        else:
            failure = TrainingFailed(message, again=all(r["type"] != RunFailed.__name__ for r in reports))
    if unsent:
        print(unsent, flush=True)
    if failure is not None:
        notify(training.on_failure, run_dir, str(failure))
        raise failure
    return dict(json.loads(summary.read_text()))


def _start(run_dir: Path, training: TrainingConfig) -> subprocess.Popen[bytes] | None:
    """torchrun as a child in a process group of its own, or None when somebody else starts it on each
    node.
    """
    run_json = run_dir / "run.json"
    if training.launcher == "external":
        commands = node_commands(training, run_json)
        (run_dir / "commands.txt").write_text("\n".join(commands) + "\n")
        print(
            "start these commands, one on each node (also in commands.txt):",
            *commands,
            sep="\n  ",
            flush=True,
        )
        return None
    command = [sys.executable, "-m", "dflash_core.launch.launcher", *torchrun_arguments(training, run_json)]
    # torchrun logs the exit of each rank with a traceback of its own; our one message says it better.
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node(training))
    environment = {"LOGLEVEL": "CRITICAL", "OMP_NUM_THREADS": str(threads), **os.environ}
    return subprocess.Popen(command, env=environment, process_group=0)


def _watch(
    run_dir: Path, training: TrainingConfig, child: subprocess.Popen[bytes] | None, summary: Path
) -> None:
    """Until the ranks are gone (or, started elsewhere, have finished or failed).

    Raises:
        TrainingFailed: no rank changed its phase for `stall_seconds`; stacks of all local ranks are written.
    """
    last_look = started = time.time()
    while child.poll() is None if child else not (summary.exists() or read_reports(run_dir)):
        time.sleep(POLL_SECONDS)
        if time.time() - last_look < min(5.0, training.stall_seconds / 4):
            continue
        last_look = time.time()
        everyone = read_records(run_dir)  # ranks that are done count as well: torchrun takes a moment to end
        records = [r for r in everyone if r["status"] == "running"]
        newest = max((r["since"] for r in everyone), default=started if child else last_look)
        running = records and all(r["phase"] not in START_PHASES for r in records)
        limit = training.stall_seconds if running else max(training.stall_seconds, START_SECONDS)
        if last_look - newest > limit:
            raise TrainingFailed(_describe_stall(run_dir, records, last_look))


def _describe_stall(run_dir: Path, records: list[dict[str, Any]], now: float) -> str:
    """Dump the stacks of the local ranks and name the one that the others wait for."""
    if not records:
        return "stall: no rank has started; is the rendezvous reachable?"
    for record in records:
        for process in _local_processes([record]):
            process.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    # A rank that does something holds up those that wait, also one that is ahead of them: the drafter of step 7
    # waits for a target that hangs in its capture for step 8. A process that the system has stopped comes first.
    stopped = {p.pid for p in _local_processes(records) if p.status() == psutil.STATUS_STOPPED}
    slowest = min(
        records,
        key=lambda r: (r["pid"] not in stopped, r["phase"].startswith("wait"), r["step"], r["microbatch"]),
    )
    return (
        f"stall: no rank has moved for {now - max(r['since'] for r in records):.0f} s "
        "(training.stall_seconds); slowest: "
        f"rank {slowest['rank']} ({slowest['role']}, pid {slowest['pid']} on {slowest['host']}) in phase "
        f"'{slowest['phase']}' of step {slowest['step']} for {now - slowest['since']:.0f} s; stacks of all "
        "ranks in "
        f"{run_dir / 'ranks'}/rank-*.stacks; the run was ended and resumes from the newest complete "
        "checkpoint"
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
    except BaseException:  # a second Ctrl-C: no more grace
        alive = everyone
        raise
    finally:
        # torchrun goes last: it must not find dead ranks and act on it while they are being killed.
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
    """Living rank processes of this machine; a pid that now belongs to something else is left alone."""
    out = []
    for record in records:
        if record["host"] == socket.gethostname():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record["pid"])
                if process.create_time() <= record["started"] and "dflash_core.training" in process.cmdline():
                    out.append(process)
    return out


def notify(hook: str | None, run_dir: Path, message: str) -> None:
    """Tell `training.on_failure`: POST JSON to a URL, or run a command with DFLASH_RUN and DFLASH_MESSAGE
    set.
    """
    if hook is None:
        return
    try:
        if hook.startswith(("http://", "https://")):
            body = json.dumps({"run": str(run_dir), "message": message}).encode()
            request = urllib.request.Request(hook, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
        else:
            variables = {**os.environ, "DFLASH_RUN": str(run_dir), "DFLASH_MESSAGE": message}
            subprocess.run(hook, shell=True, timeout=30, check=True, env=variables)
    except (
        OSError,
        subprocess.SubprocessError,
    ) as error:  # a broken hook must not replace the failure it tells of
        print(f"training.on_failure: {hook!r} failed: {error}", flush=True)


def main(arguments: list[str]) -> int:
    """torchrun that ends with its parent, without torchrun's own tracebacks."""
    end_with_parent()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError:
        return 1
    except SignalException as received:
        return 128 + int(received.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
