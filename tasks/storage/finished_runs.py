"""`finished.json`, the mark of a run that has trained to its last step, with the digests of its outputs.

A run that has this file is skipped, and its drafter is evaluated and served. So its outputs are compared with
what was recorded, wherever they are used: a copy of the run may be cut short, a file may be damaged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE
from dflash_core.errors import UserError
from dflash_core.files import file_sha256, write_json
from tasks.storage.file_digests import FileDigests

FINISHED = "finished.json"
DRAFTER = (f"drafter/{CONFIG_FILE}", f"drafter/{WEIGHTS_FILE}")
# Outputs that cannot be made again without training.
FIGURES = ("summary.json", "metrics.jsonl")
# Next step where an output of a finished run is damaged.
RESTORE = "restore the run's directory from a copy, or train it again with --param 'refresh=[\"train\"]'"


def mark_finished(directory: Path, summary: dict[str, Any]) -> None:
    """Write finished.json of a run directory, as the last of its files."""
    files = {name: _recorded(directory / name) for name in (*DRAFTER, *FIGURES)}
    write_json(directory / FINISHED, {"finished": int(time.time()), "summary": summary, "files": files})


def _recorded(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def drafter_defect(directory: Path, digests: FileDigests) -> str | None:
    """Return in which way the drafter of a finished run differs from what was recorded; None: in none.

    Args:
        directory: of the run; where it has no finished.json, nothing is known about its drafter.
    """
    return _defect(directory, DRAFTER, digests.of)


def check_figures(directory: Path) -> None:
    """Check that summary and metrics of a finished run are what its last step left.

    Raises:
        UserError: one of them is missing or was changed.
    """
    if defect := _defect(directory, FIGURES, file_sha256):
        raise UserError(f"{directory / defect}; {RESTORE}")


def check_drafter(drafter: Path, digests: FileDigests) -> None:
    """Check an exported drafter that lies in a run's directory; of any other one nothing is known.

    Raises:
        UserError: it is not the one that the run has exported.
    """
    if drafter.name == "drafter" and (defect := drafter_defect(drafter.parent, digests)):
        raise UserError(
            f"{drafter.parent / defect}; repeat the command that trained this run, and it is exported again "
            "from the last checkpoint"
        )


def _defect(directory: Path, names: tuple[str, ...], sha256_of: Callable[[Path], str]) -> str | None:
    """Return the first difference between files and finished.json, starting with the name of a file."""
    path = directory / FINISHED
    if not path.exists():
        return None
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        # Runs of earlier versions record no digests.
        if "files" not in contents:
            return None
        recorded = contents["files"]
        expected = [(name, int(recorded[name]["bytes"]), recorded[name]["sha256"]) for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{FINISHED} cannot be read or lacks {error}"
    for name, num_bytes, sha256 in expected:
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size != num_bytes:
            return f"{name} has {size} bytes, {num_bytes} were written"
        if sha256_of(directory / name) != sha256:
            return f"{name} was changed after it had been written"
    return None
