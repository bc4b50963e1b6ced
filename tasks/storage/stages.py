"""Stages: tasks whose outputs are kept under a digest of what decides them, and rerun only when that changes.

A stage is a plain function `function(out: Path, **inputs) -> dict` that writes files into `out` and returns a
small summary. `@stage(...)` adds, around it, what every stage needs:

* the key: digest of the inputs (content digests, settings; never paths or times) and of the stage's code
  version,
* the place: `<storage_root>/store/<stage>/<key>/`, filled under a temporary name and published by
  `os.replace`,
* the pointer: JSON with the summary, the key and the directory relative to the storage root, also kept beside
  the files as `pointer.json`, so that a stage is up to date exactly when its pointer and every file it lists
  are there,
* a Prefect task of the same name with that key as its cache key, so that the UI shows what was cached.

Prefect's own cache never decides alone: outputs that are gone rerun the stage, and outputs that are there
although Prefect has forgotten them are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.futures import PrefectFuture

from dflash_core.errors import UserError
from dflash_core.files import content_digest, write_json

POINTER = "pointer.json"
SHOWN_CACHED = 20  # cached task runs of one stage that a flow run shows
STAGE_SECONDS = 6 * 3600.0  # the time limit of a stage: one file, one epoch, one evaluation

PUBLISH_SECONDS = 1800.0  # of a report on its way to MLflow

# For tasks that read files or the network. A user's mistake does not go away by trying again.
RETRY_IO: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    "retry_condition_fn": lambda _task, _task_run, state: not isinstance(state.data, UserError),
}


def resolution_seconds(mtime_ns: int) -> float:
    """Upper bound of the resolution of a modification time: 2 s for whole seconds (FAT, old NFS), else 0.05 s.

    Local Linux file systems take the time of the kernel's last tick, at most 10 ms ago.
    """
    return 2.0 if mtime_ns % 1_000_000_000 == 0 else 0.05


@dataclass
class FileDigests:
    """sha256 of files, remembered by path, size and modification time in one JSON file under the storage root.

    A file that is rewritten within the resolution of its modification time looks unchanged. So a file is read only
    once its time is older than that resolution (`resolution_seconds`), and a digest that was read is always right.
    """

    storage_root: Path
    _known: dict[str, list[Any]] = field(default_factory=dict)
    _changed: bool = False

    def __post_init__(self) -> None:
        try:
            self._known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            self._known = {}

    @property
    def _path(self) -> Path:
        return self.storage_root / "store" / "file_digests.json"

    def of(self, path: Path) -> str:
        """The file's sha256, 64 hex characters."""
        status, name = path.stat(), str(path.resolve())
        stamp = [status.st_size, status.st_mtime_ns]
        known = self._known.get(name)
        if known and known[:2] == stamp:
            return str(known[2])
        age = (time.time_ns() - status.st_mtime_ns) / 1e9
        settled = resolution_seconds(status.st_mtime_ns)
        if 0 <= age < settled:
            time.sleep(settled - age)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if age >= 0:  # a time in the future never grows old: such a file is read again each time
            self._known[name] = [*stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Keeps what was learnt, if anything."""
        if self._changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._known)
            self._changed = False


def read_complete(directory: Path) -> dict[str, Any] | None:
    """The pointer in a stage's directory when every file that it lists is there, else None."""
    try:
        pointer: dict[str, Any] = json.loads((directory / POINTER).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return pointer if all((directory / name).exists() for name in pointer["files"]) else None


class Stage:
    """One stage; see the module's docstring. Call it with the storage root and its inputs as keywords."""

    def __init__(
        self,
        function: Callable[..., dict[str, Any]],
        name: str,
        version: int,
        sources: tuple[str, ...],
        locations: tuple[str, ...],
        task_options: dict[str, Any],
    ) -> None:
        self.function, self.name, self.version = function, name, version
        self.sources, self.locations = sources, locations
        self.__doc__ = function.__doc__
        self._configured: dict[tuple[bool, bool, Path], Any] = {}
        self.task = task(
            name=name,
            task_run_name="{label}",
            cache_key_fn=lambda _context, parameters: f"{name}-{parameters['key']}",
            persist_result=True,
            result_serializer="json",
            **task_options,
        )(self.produce)

    def key(self, inputs: dict[str, Any]) -> str:
        """Digest of the code version and of all inputs but the locations."""
        decisive = {name: value for name, value in inputs.items() if name not in self.locations}
        return content_digest({"stage": self.name, "version": self.version, "inputs": decisive})

    def directory(self, storage_root: Path, inputs: dict[str, Any]) -> Path:
        """Where the outputs for these inputs are, or would be."""
        return storage_root / "store" / self.name / self.key(inputs)

    def _arguments(
        self,
        storage_root: Path,
        inputs: dict[str, Any],
        label: str | None,
        after: Iterable[Any],
        refresh: bool,
        submitted: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        stale = refresh or read_complete(self.directory(storage_root, inputs)) is None
        results = storage_root.resolve() / "prefect" / "storage"
        if (
            stale,
            submitted,
            results,
        ) not in self._configured:  # making a task is slow: once, not once a file
            self._configured[stale, submitted, results] = self.task.with_options(
                refresh_cache=stale,
                result_storage=results,
                timeout_seconds=0
                if submitted
                else None,  # none in a thread, which nothing interrupts; else as it is
            )
        configured = self._configured[stale, submitted, results]
        return configured, {
            "storage_root": str(storage_root),
            "inputs": inputs,
            "key": self.key(inputs),
            "label": label or self.name,
            "refresh": refresh,
            "after": list(after),
        }

    def __call__(
        self,
        storage_root: Path,
        *,
        label: str | None = None,
        after: Iterable[Any] = (),
        refresh: bool = False,
        **inputs: Any,
    ) -> dict[str, Any]:
        """Runs the stage, or returns its pointer at once when it is up to date.

        Args:
            label: name of the task run.
            after: pointers this stage builds on, so that Prefect draws the graph.
            refresh: run although nothing changed.
        """
        configured, arguments = self._arguments(storage_root, inputs, label, after, refresh)
        return configured(**arguments)

    def submit(
        self,
        storage_root: Path,
        *,
        label: str | None = None,
        after: Iterable[Any] = (),
        refresh: bool = False,
        **inputs: Any,
    ) -> PrefectFuture[dict[str, Any]]:
        """As calling it, through the flow's task runner."""
        configured, arguments = self._arguments(storage_root, inputs, label, after, refresh, submitted=True)
        return configured.submit(**arguments)

    def map(
        self, storage_root: Path, calls: Sequence[dict[str, Any]], *, refresh: bool = False
    ) -> list[dict[str, Any]]:
        """One task a file or an epoch through the flow's task runner; returns the pointers in order.

        Even a cached task run costs Prefect 30 ms: where more than `SHOWN_CACHED` calls are up to date, these are read
        and not shown.

        Args:
            calls: keywords of `submit` for each, without `refresh`.

        Raises:
            TimeoutError: a task did not end within `STAGE_SECONDS` after the one before.
        """
        done: dict[int, dict[str, Any]] = {}
        if not refresh:
            for i, call in enumerate(calls):
                inputs = {name: value for name, value in call.items() if name not in ("label", "after")}
                if (pointer := read_complete(self.directory(storage_root, inputs))) is not None:
                    done[i] = pointer
        if len(done) <= SHOWN_CACHED:
            done.clear()
        else:
            get_run_logger().info("%s: %d of %d are up to date", self.name, len(done), len(calls))
        futures = {
            i: self.submit(storage_root, refresh=refresh, **call)
            for i, call in enumerate(calls)
            if i not in done
        }
        return [done[i] if i in done else futures[i].result(timeout=STAGE_SECONDS) for i in range(len(calls))]

    def produce(
        self, storage_root: str, inputs: dict[str, Any], key: str, label: str, refresh: bool, after: list[Any]
    ) -> dict[str, Any]:
        """The task's body: outputs into a temporary directory, then under their name in one rename."""
        del label, after
        final = Path(storage_root) / "store" / self.name / key
        if not refresh and (pointer := read_complete(final)) is not None:
            return pointer
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{key[:12]}-{os.getpid()}-", dir=final.parent))
        try:
            summary = self.function(temporary, **inputs)
            files = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
            pointer = {
                "stage": self.name,
                "version": self.version,
                "key": key,
                "path": final.relative_to(storage_root).as_posix(),
                "files": files,
                **summary,
            }
            write_json(temporary / POINTER, pointer)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return pointer


def _remove_leftovers(directory: Path) -> None:
    """Removes temporary directories whose process is gone: a stage killed half-way leaves nothing behind for
    long.
    """
    for leftover in directory.glob(".*-*-*"):
        pid = leftover.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(leftover, ignore_errors=True)


STAGES: dict[str, Stage] = {}


def stage(
    name: str,
    *,
    version: int,
    sources: tuple[str, ...] = (),
    locations: tuple[str, ...] = (),
    timeout_seconds: float | None = STAGE_SECONDS,
    **task_options: Any,
) -> Callable[[Callable[..., dict[str, Any]]], Stage]:
    """Decorator that makes a stage of `function(out, **inputs) -> summary`; see the module's docstring.

    Args:
        version: code version; raise it whenever the same inputs could now give other outputs.
        sources: modules or packages of dflash_core whose code decides the outputs; a test holds their digest.
        locations: inputs that say where something lies or how fast to work; they are not part of the key.
        timeout_seconds: after which the task ends as TimedOut; None where the work has limits of its own.
        task_options: Prefect's, such as retries.
    """
    task_options["timeout_seconds"] = timeout_seconds

    def decorate(function: Callable[..., dict[str, Any]]) -> Stage:
        STAGES[name] = Stage(function, name, version, sources, locations, task_options)
        return STAGES[name]

    return decorate
