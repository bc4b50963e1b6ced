"""What of the store nothing refers to any more, and its removal."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

YOUNG_SECONDS = 3600.0  # outputs younger than this may belong to a flow that is still running


@dataclass(frozen=True)
class Removable:
    """A directory that can go, why, and its size."""

    path: Path
    reason: str
    num_bytes: int


def size_of(directory: Path) -> int:
    """Bytes of all files below; a hard link counts where it is."""
    return sum(p.lstat().st_size for p in directory.rglob("*") if p.is_file())


def run_directories(root: Path) -> list[Path]:
    """Runs of all deployments: directories with a run.json, the link `latest` left aside."""
    return sorted(p.parent for p in root.glob("*/*/run.json") if not p.parent.is_symlink())


def _paths_in(value: object) -> Iterable[Path]:
    if isinstance(value, str):
        yield Path(value)
    elif isinstance(value, list):
        for item in value:
            yield from _paths_in(item)


def referenced(root: Path, runs: Iterable[Path]) -> set[Path]:
    """Stage directories that the runs' inputs lie in: `store/<stage>/<key>`."""
    store, found = (root / "store").resolve(), set()
    for run in runs:
        described = json.loads((run / "run.json").read_text(encoding="utf-8"))
        for value in [*described["paths"].values(), *described.get("used", [])]:
            for path in _paths_in(value):
                parts = path.resolve().parts[len(store.parts) :]
                if path.resolve().is_relative_to(store) and len(parts) >= 2:
                    found.add(store / parts[0] / parts[1])
    return found


def find_removable(
    root: Path, *, keep_runs: int | None, protected_runs: set[Path], now: float | None = None
) -> list[Removable]:
    """What can go: old runs (only where `keep_runs` is given), then stage outputs that no kept run refers to.

    Args:
        root: the storage root.
        keep_runs: newest runs to keep of each deployment; None: all.
        protected_runs: runs kept in any case, because something outside refers to them.
        now: seconds since 1970, for tests.
    """
    root, now = root.resolve(), time.time() if now is None else now
    runs = run_directories(root)
    old: list[Path] = []
    if keep_runs is not None:
        for deployment in {run.parent for run in runs}:
            newest = sorted(
                (run for run in runs if run.parent == deployment),
                key=lambda run: (run / "run.json").stat().st_mtime,
            )
            latest = (deployment / "latest").resolve()
            old += [r for r in newest[:-keep_runs] if r != latest and r not in protected_runs]
    kept = [run for run in runs if run not in old]
    wanted = referenced(root, kept)
    found = [Removable(run, "old run", size_of(run)) for run in sorted(old)]
    for directory in sorted((root / "store").glob("*/*")):
        if not directory.is_dir() or directory in wanted or now - directory.stat().st_mtime < YOUNG_SECONDS:
            continue
        reason = "left over" if directory.name.startswith(".") else "no run refers to it"
        found.append(Removable(directory, reason, size_of(directory)))
    return found


def remove(found: Iterable[Removable]) -> None:
    """Removes the directories, each under a hidden name first, so that nothing half-removed looks whole."""
    for item in found:
        hidden = item.path.with_name(f".removed-{item.path.name}")
        item.path.rename(hidden)
        shutil.rmtree(hidden)
