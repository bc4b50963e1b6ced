"""Rank status files for the launcher: the phase of each rank, and the error of a rank that failed.

`<run>/ranks/rank-3.json` is rewritten in place at each change of phase: rank and process, step, phase, time
of entering it. The launcher reads these files to find a stall, the slowest rank, and a rank that ended
without an error report. `rank-3.stacks` gets the stacks of all threads on SIGUSR1. `rank-3.error.json` is the
error report of a rank that failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.errors import Stopped, UserError
from dflash_core.processes import this_process
from dflash_core.redaction import redact

START_PHASES = ("starting", "load", "connect", "probe")
_RECORD_BYTES = 1024


class RankRecord:
    """Status of this rank; `phase` is cheap enough (some microseconds) to be called for every microbatch."""

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
            **this_process(),
            "status": "running",
            "step": 0,
            "microbatch": 0,
            "phase": "starting",
            "since": time.time(),
            "seconds": {},  # since the process started, by the first word of the phase
        }
        self.seconds: dict[str, float] = {}
        self._entered = time.monotonic()
        self._flush()

    def _flush(self) -> None:
        # Padded to one size and written by one call, so a reader never sees half a record.
        os.pwrite(self._fd, json.dumps(self._record).ljust(_RECORD_BYTES).encode(), 0)

    def phase(self, name: str, *, step: int | None = None, microbatch: int | None = None) -> None:
        """Enter a phase, and add the time spent in the one before to `seconds`."""
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
        """Return the seconds by phase since the last call."""
        self.phase(self._record["phase"])
        taken, self.seconds = self.seconds, {}
        return taken

    def end(self, status: str) -> None:
        """Write the final status: `done`, `stopped` or `failed`; that of a killed rank stays `running`."""
        self._record |= {"status": status, "since": time.time()}
        self._flush()

    def close(self) -> None:
        """Close the files; later phases are not recorded."""
        if not self._stacks.closed:
            faulthandler.unregister(signal.SIGUSR1)
            self._stacks.close()
            os.close(self._fd)

    def report_error(self, error: BaseException) -> None:
        """Write the error report of this rank and the status `failed`."""
        text = str(error) or type(error).__name__
        report = {
            **{k: self._record[k] for k in ("rank", "role", "host", "phase", "step", "microbatch")},
            "time": time.time(),
            "type": type(error).__name__,
            "user_error": isinstance(error, UserError),
            "message": redact(text),
            "traceback": redact("".join(traceback.format_exception(error))),
        }
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            self._error.write_text(json.dumps(report, indent=1))
        self.end("failed")


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the status records of all ranks of a run, by rank."""
    return _read_all(run_dir, "rank-*.json", skip=".error.json")


def read_errors(run_dir: Path) -> list[dict[str, Any]]:
    """Return the error reports, earliest first; broken connections, which are consequences, come last."""
    errors = _read_all(run_dir, "rank-*.error.json")
    return sorted(errors, key=lambda r: (_is_broken_connection(r), r["time"]))


def _read_all(run_dir: Path, pattern: str, skip: str | None = None) -> list[dict[str, Any]]:
    records = []
    for path in (run_dir / "ranks").glob(pattern):
        if skip is None or not path.name.endswith(skip):
            with contextlib.suppress(ValueError, OSError, RecursionError):
                record = json.loads(path.read_text())
                # What a rank writes has all of its fields; anything else is damage.
                if isinstance(record, dict) and type(record.get("rank")) is int and "phase" in record:
                    records.append(record)
    return sorted(records, key=lambda r: r["rank"])


@contextlib.contextmanager
def reporting(record: RankRecord) -> Iterator[None]:
    """Report an error that escapes, and write the final status; `Stopped` needs no report."""
    try:
        yield
    except Stopped:
        record.end("stopped")
        raise
    except BaseException as error:
        record.report_error(error)
        raise
    else:
        record.end("done")


def explain(run_dir: Path, exit_code: int | None) -> str:
    """Return one message for a failed run: the rank that failed first, its role, its phase and the cause.

    A rank that was killed leaves no error report, while its peers report broken connections; so a rank whose
    status is still `running` is named first, unless a rank reports a user's mistake.
    """
    errors, records = read_errors(run_dir), read_records(run_dir)
    for error in errors:
        if error["user_error"]:
            return str(error["message"])
    for record in records:
        if record["status"] == "running":
            rank = f"rank {record['rank']} ({record['role']}, pid {record['pid']} on {record['host']})"
            return (
                f"{rank} ended without a report in phase '{record['phase']}' of step {record['step']}: "
                "killed from outside, or by the system for lack of memory; the run resumes from the newest "
                "complete checkpoint"
            )
    stopped = [r for r in records if r["status"] == "stopped"]
    if stopped and all(_is_broken_connection(e) for e in errors):
        step = stopped[0]["step"]
        return f"training was stopped by a signal at step {step}; the run resumes from its checkpoint"
    if errors:
        first = errors[0]
        path = run_dir / "ranks" / f"rank-{first['rank']}.error.json"
        rank = f"rank {first['rank']} ({first['role']} on {first['host']})"
        cause = f"{first['type']}: {first['message']} (traceback in {path})"
        return f"{rank} failed in phase '{first['phase']}' of step {first['step']}: {cause}"
    return f"training ended with exit code {exit_code} before any rank had started"


def _is_broken_connection(error: dict[str, Any]) -> bool:
    """Return True for an error that is only the consequence of another rank's end."""
    return error["type"] == "RuntimeError" and "onnection" in error["message"]
