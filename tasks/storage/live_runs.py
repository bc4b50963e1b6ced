"""Flow runs that live: what they use is not removed, and what dead ones have left is.

While a flow run lasts, `<storage_root>/live/<flow run id>.json` names its flow and its process. A flow marks
each directory that it uses with the time (`mark_used`), so everything with a later time than the note of the
oldest live run may be in use; `prune` leaves that alone. Both times are the file system's, so clocks do not
matter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_core.files import remove_leftovers, write_json
from dflash_core.processes import is_gone, this_process

# Resolution of file times on old network file systems.
RESOLUTION_SECONDS = 2.0


@dataclass(frozen=True)
class LiveRun:
    """A flow run that has not ended, or of which that is not known."""

    note: Path
    # Seconds since 1970, by the clock of the file system.
    since: float
    # The flow and its process, in words.
    description: str


@contextlib.contextmanager
def live_note(storage_root: Path, flow_run_id: str, flow_name: str) -> Iterator[None]:
    """Keep a note about this flow run while the body runs; first remove what dead processes have left."""
    note = storage_root / "live" / f"{flow_run_id}.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"flow": flow_name, **this_process()})
    try:
        remove_all_leftovers(storage_root)
        yield
    finally:
        note.unlink(missing_ok=True)


def remove_all_leftovers(storage_root: Path) -> None:
    """Remove temporary files and notes of dead processes, wherever flows write them."""
    live_runs(storage_root)
    for pattern in ("", "*", "*/*", "*/*/captures"):
        for directory in [storage_root] if not pattern else storage_root.glob(pattern):
            # An entry of the store appears complete, and there may be very many of them.
            is_entry = directory.parent.parent == storage_root / "store"
            if directory.is_dir() and not directory.is_symlink() and not is_entry:
                remove_leftovers(directory)


def live_runs(storage_root: Path, *, besides: str = "") -> list[LiveRun]:
    """Return the flow runs that live, oldest first, besides one with this id; remove notes of dead ones."""
    found = []
    for path in (storage_root / "live").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            since = path.stat().st_mtime
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
                description = f"{note['flow']}, process {note['pid']} on {note['host']}"
                is_dead = is_gone(note)
            except (ValueError, KeyError, TypeError):
                description, is_dead = "an unknown flow", False
            if is_dead:
                path.unlink(missing_ok=True)
            elif path.stem != besides:
                found.append(LiveRun(path, since, description))
    return sorted(found, key=lambda run: run.since)


def mark_used(directory: Path) -> None:
    """Mark a directory as used by this flow run; one that does not exist, or cannot be marked, is left."""
    with contextlib.suppress(OSError):
        os.utime(directory)


def may_be_used(directory: Path, live: list[LiveRun]) -> bool:
    """Return whether a live run may use a directory: it was marked or written after the run started."""
    return bool(live) and directory.stat().st_mtime >= live[0].since - RESOLUTION_SECONDS
