"""Forwarding of `metrics.jsonl` to a callback while a run trains: every line in order, at least once.

A callback that raises gets the same lines again later, with growing pauses, so an outage of the tracking
server loses nothing. `metrics.forwarded.json` records the accepted lines, so a step that is repeated after a
resume is not sent twice; only lines accepted in the instant before a kill can be sent again, with equal step
and time.
"""

from __future__ import annotations

import contextvars
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.files import write_json
from dflash_core.redaction import redact

POLL_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0  # after failures in a row

OnMetrics = Callable[[list[dict[str, Any]]], None]


class MetricsForwarder:
    """A thread that reads new lines of `<run_dir>/metrics.jsonl` and passes them to `on_metrics`."""

    def __init__(self, run_dir: Path, on_metrics: OnMetrics) -> None:
        self.path, self.marker = run_dir / "metrics.jsonl", run_dir / "metrics.forwarded.json"
        self.on_metrics = on_metrics
        self.error: Exception | None = None
        self._sent = _read_sent(self.marker)
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
                    message = f"metrics are kept and sent later: {type(error).__name__}: {error}"
                    print(redact(message), flush=True)
                pause, self.error = min(MAX_PAUSE_SECONDS, pause * 2), error
            if finishing and self.error is None:
                return
            self._done.wait(pause) if not finishing else time.sleep(min(pause, 1.0))

    def _forward(self) -> None:
        """Send the new lines; the offset moves only after the callback has returned."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return
        # A resume cuts the file by writing a new one.
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._offset, self._inode = 0, stat.st_ino
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        chunk = chunk[: chunk.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in chunk.splitlines()]
        fresh = [line for line in lines if line["step"] > self._sent.get(_kind_of(line), -1)]
        if fresh:
            self.on_metrics(fresh)
            for line in fresh:
                self._sent[_kind_of(line)] = line["step"]
            write_json(self.marker, self._sent)
        self._offset += len(chunk)

    def finish(self, seconds: float) -> str | None:
        """Send the remaining lines for at most `seconds`; return a message about unsent ones, or None."""
        self._done.set()
        self._thread.join(seconds)
        if not self._thread.is_alive() or self.error is None:
            return None
        return redact(f"metrics in {self.path} after {self._sent} were not accepted: {self.error}")


def _read_sent(marker: Path) -> dict[str, int]:
    """Return the last step sent of each kind; a damaged file is as none: equal points are harmless."""
    try:
        sent = json.loads(marker.read_text(encoding="utf-8"))
        return {str(kind): int(step) for kind, step in sent.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _kind_of(line: dict[str, Any]) -> str:
    """Return the kind of a line, training or validation; steps rise within each."""
    return "validation" if any(name.startswith("validation/") for name in line) else "train"
