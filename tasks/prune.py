"""Find and remove old runs and the stage outputs that no run references.

Nothing that a kept run's run.json names is removed, nothing younger than `YOUNG_SECONDS`, and nothing that a
flow run that still lives may use (`tasks.storage.live_runs`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.files import temporary_name
from tasks.storage.live_runs import live_runs, may_be_used

# Outputs younger than this may belong to a flow that is still running.
YOUNG_SECONDS = 3600.0


@dataclass(frozen=True)
class Removable:
    """A directory that can be removed, the reason, and its size."""

    path: Path
    reason: str
    num_bytes: int


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory; a hard link counts each time."""
    return sum(p.lstat().st_size for p in directory.rglob("*") if p.is_file())


def run_directories(root: Path) -> list[Path]:
    """Return the runs of all deployments: directories with a run.json, without the links `latest`."""
    return sorted(p.parent for p in root.glob("*/*/run.json") if not p.parent.is_symlink())


def _paths_in(value: object) -> Iterable[Path]:
    if isinstance(value, str):
        yield Path(value)
    elif isinstance(value, list):
        for item in value:
            yield from _paths_in(item)


def referenced(root: Path, runs: Iterable[Path]) -> set[Path]:
    """Return the stage directories `store/<stage>/<key>` that hold inputs of the runs.

    Raises:
        UserError: a run.json cannot be read, so that the inputs of its run are not known.
    """
    store, directories = (root / "store").resolve(), set()
    for run in runs:
        try:
            contents = json.loads((run / "run.json").read_text(encoding="utf-8"))
            values = [*contents["paths"].values(), *contents.get("used", [])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{run / 'run.json'} cannot be read ({error}), and nothing is removed, for it names what the "
                "run needs; restore it, or remove the directory of the run"
            ) from error
        for path in _paths_in(values):
            directories |= _stage_directories(store, path if path.is_absolute() else run / path)
    return directories


def _stage_directories(store: Path, path: Path) -> set[Path]:
    """Return the stage directory that a path lies in, or lay in before the storage root was moved.

    A checked target holds a link to the model in another one, which is returned too.
    """
    parts = Path(os.path.normpath(path)).parts
    tails = (parts[i + 1 : i + 3] for i, part in enumerate(parts) if part == "store")
    found = {directory for tail in tails if len(tail) == 2 and (directory := store.joinpath(*tail)).is_dir()}
    links = (directory / "model" for directory in found)
    return found | {link.resolve().parent for link in links if link.is_symlink() and link.is_dir()}


def find_removable(
    root: Path,
    *,
    keep_runs: int | None,
    protected_runs: set[Path],
    flow_run_id: str = "",
    now: float | None = None,
) -> list[Removable]:
    """Return old runs (only where `keep_runs` is given), then stage outputs that no kept run refers to.

    Args:
        root: the storage root.
        keep_runs: newest runs to keep of each deployment; None: all.
        protected_runs: runs kept in any case, because something outside refers to them.
        flow_run_id: of the flow that removes; what other live runs may use is left out.
        now: seconds since 1970, for tests.
    """
    root, now = root.resolve(), time.time() if now is None else now
    runs, live = run_directories(root), live_runs(root, besides=flow_run_id)
    old = [] if keep_runs is None else _old_runs(runs, keep_runs, protected_runs)
    old = [run for run in old if not may_be_used(run, live)]
    used = referenced(root, [run for run in runs if run not in old])
    removable = [Removable(run, "old run", size_of(run)) for run in sorted(old)]
    for directory in sorted((root / "store").glob("*/*")):
        if not directory.is_dir() or directory in used or now - directory.stat().st_mtime < YOUNG_SECONDS:
            continue
        if may_be_used(directory, live):
            continue
        reason = "left over" if directory.name.startswith(".") else "no run refers to it"
        removable.append(Removable(directory, reason, size_of(directory)))
    return removable


def _old_runs(runs: list[Path], keep_runs: int, protected_runs: set[Path]) -> list[Path]:
    """Return the runs beyond the newest of their deployment, without the latest and the protected ones."""
    old: list[Path] = []
    for deployment in {run.parent for run in runs}:
        by_age = sorted(
            (run for run in runs if run.parent == deployment),
            key=lambda run: (run / "run.json").stat().st_mtime,
        )
        latest = (deployment / "latest").resolve()
        old += [run for run in by_age[:-keep_runs] if run != latest and run not in protected_runs]
    return old


def remove(root: Path, removable: Iterable[Removable], *, flow_run_id: str = "") -> list[Removable]:
    """Remove the directories, and return those that were removed.

    Each gets a hidden name first, so that a partial one never looks complete. A flow that has started since
    the directories were found may have marked one meanwhile: it gets its name back.
    """
    removed: list[Removable] = []
    kept: set[Path] = set()
    for item in removable:
        if item.path in kept:
            continue
        hidden = temporary_name(item.path)
        try:
            item.path.rename(hidden)
        except FileNotFoundError:
            continue
        if may_be_used(hidden, live_runs(root, besides=flow_run_id)):
            with contextlib.suppress(OSError):
                os.rename(hidden, item.path)
                if (item.path / "run.json").exists():
                    kept |= referenced(root, [item.path])
                continue
        shutil.rmtree(hidden)
        removed.append(item)
    return removed
