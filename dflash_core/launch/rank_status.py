"""What a rank leaves for the launcher to see, and how it dies.

`<run>/ranks/rank-3.json` is rewritten in place at each change of phase: who it is, where it stands, since
when. The launcher reads these files to find a stall, the slowest rank, and which rank ended without a word.
`rank-3.stacks` gets the stacks of all threads on SIGUSR1. `rank-3.error.json` is the report of a rank that
failed.

A rank ends with its parent (Linux PR_SET_PDEATHSIG) and within `STOP_SECONDS` of SIGTERM, whatever its main
thread is blocked in: the signal is seen by a thread of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.errors import Stopped, UserError

START_PHASES = ("starting", "load", "connect", "probe")
_RECORD_BYTES = 1024


class RankRecord:
    """The rank's own line for the launcher; `phase` is cheap enough (some microseconds) for every
    microbatch.
    """

    def __init__(self, run_dir: Path, rank: int, role: str) -> None:
        directory = run_dir / "ranks"
        directory.mkdir(parents=True, exist_ok=True)
        self._error = directory / f"rank-{rank}.error.json"
        self._error.unlink(missing_ok=True)
        self._fd = os.open(directory / f"rank-{rank}.json", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._stacks = open(directory / f"rank-{rank}.stacks", "w")  # noqa: SIM115 (lives as long as the process)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._record: dict[str, Any] = {
            "rank": rank,
            "role": role,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            "status": "running",
            "step": 0,
            "microbatch": 0,
            "phase": "starting",
            "since": time.time(),
            "seconds": {},  # of the whole process, by the first word of the phase
        }
        self.seconds: dict[str, float] = {}
        self._entered = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        # Padded to one size and written by one call, so a reader never sees half a record.
        os.pwrite(self._fd, json.dumps(self._record).ljust(_RECORD_BYTES).encode(), 0)

    def phase(self, name: str, *, step: int | None = None, microbatch: int | None = None) -> None:
        """Enter a phase: what the rank does from now on. Adds the time of the one it leaves to `seconds`."""
        now = time.monotonic()
        left = self._record["phase"]
        self.seconds[left] = self.seconds.get(left, 0.0) + now - self._entered
        totals, kind = self._record["seconds"], left.split()[0]
        totals[kind] = round(totals.get(kind, 0.0) + now - self._entered, 4)
        self._entered = now
        self._record |= {"phase": name, "since": time.time()}
        if step is not None:
            self._record["step"] = step
        if microbatch is not None:
            self._record["microbatch"] = microbatch
        self._flush()

    def take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        self.phase(self._record["phase"])
        taken, self.seconds = self.seconds, {}
        return taken

    def end(self, status: str) -> None:
        """`done`, `stopped` or `failed`; a record that still says `running` belongs to a rank that was
        killed.
        """
        self._record |= {"status": status, "since": time.time()}
        self._flush()

    def report(self, error: BaseException) -> None:
        """Write why this rank failed."""
        text = str(error) or type(error).__name__
        report = {
            **{k: self._record[k] for k in ("rank", "role", "host", "phase", "step", "microbatch")},
            "time": time.time(),
            "type": type(error).__name__,
            "user_error": isinstance(error, UserError),
            "message": text,
            "traceback": "".join(traceback.format_exception(error)),
        }
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            self._error.write_text(json.dumps(report, indent=1))
        self.end("failed")


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of all ranks that share this directory, by rank."""
    return _read_all(run_dir, "rank-*.json", skip=".error.json")


def read_reports(run_dir: Path) -> list[dict[str, Any]]:
    """The error reports: causes before broken connections, which only tell of another rank; earliest
    first.
    """
    reports = _read_all(run_dir, "rank-*.error.json")
    return sorted(reports, key=lambda r: (_is_broken_connection(r), r["time"]))


def _read_all(run_dir: Path, pattern: str, skip: str | None = None) -> list[dict[str, Any]]:
    out = []
    for path in (run_dir / "ranks").glob(pattern):
        if skip is None or not path.name.endswith(skip):
            with contextlib.suppress(ValueError, OSError):
                out.append(json.loads(path.read_text()))
    return sorted(out, key=lambda r: r["rank"])


@contextlib.contextmanager
def reporting(record: RankRecord) -> Iterator[None]:
    """Report what escapes, and mark how the rank ended; `Stopped` needs no report."""
    try:
        yield
    except Stopped:
        record.end("stopped")
        raise
    except BaseException as error:
        record.report(error)
        raise
    else:
        record.end("done")


def explain(run_dir: Path, exit_code: int | None) -> str:
    """One message for a failed run: the rank that failed first, its role, what it did, and why.

    A rank that was killed leaves no report, while its peers report broken connections; so a rank whose record
    still says `running` is named first, unless somebody reports a user's mistake.
    """
    reports = read_reports(run_dir)
    for report in reports:
        if report["user_error"]:
            return str(report["message"])
    for record in read_records(run_dir):
        if record["status"] == "running":
            return (
                f"rank {record['rank']} ({record['role']}, pid {record['pid']} on {record['host']}) ended "
                f"without a report in phase '{record['phase']}' of step {record['step']}: killed from outside, "
                "or by the system for want of memory; the run resumes from the newest complete checkpoint"
            )
    told = [r for r in read_records(run_dir) if r["status"] == "stopped"]
    if told and all(_is_broken_connection(r) for r in reports):
        return (
            f"training was stopped by a signal at step {told[0]['step']}; the run resumes from its checkpoint"
        )
    if reports:
        first = reports[0]
        where = run_dir / "ranks" / f"rank-{first['rank']}.error.json"
        return (
            f"rank {first['rank']} ({first['role']} on {first['host']}) failed in phase '{first['phase']}' "
            f"of step {first['step']}: {first['type']}: {first['message']} (traceback in {where})"
        )
    return f"training ended with exit code {exit_code} before any rank had started"


def _is_broken_connection(report: dict[str, Any]) -> bool:
    """Such an error only tells that another rank is gone."""
    return report["type"] == "RuntimeError" and "onnection" in report["message"]
