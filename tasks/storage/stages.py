"""Stages: tasks whose outputs are kept under a digest of what decides them, and rerun only when that changes.

A stage is a plain function `function(out: Path, **inputs) -> dict` that writes files into `out` and returns a
small summary. `@stage(...)` adds what every stage needs:

* the key: the digest of the inputs (content digests and settings, never paths or times) and of the stage's
  code version.
* the directory: `<storage_root>/store/<stage>/<key>/`, published complete or not at all.
* the pointer: JSON with the summary, the key and the directory relative to the storage root. It is also kept
  next to the files as `pointer.json`: a stage is up to date exactly when its pointer and every file that it
  lists exist.
* a Prefect task of the same name with the key as its cache key, so that the UI shows what was cached.

Guarantee: Prefect's own cache never decides alone. Outputs that are gone rerun the stage, and outputs that
exist are used although Prefect has forgotten them. Price: about 30 ms of Prefect per task run, cached or not
(see `Stage.map`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.futures import PrefectFuture

from dflash_core.errors import UserError
from dflash_core.files import content_digest, publish_directory, write_json
from dflash_core.redaction import redacted_exceptions

POINTER = "pointer.json"
# Number of cached task runs of one stage that a flow run shows.
SHOWN_CACHED = 20
# Time limit of one run of a stage: one file, one epoch, one evaluation.
STAGE_SECONDS = 6 * 3600.0
# Time limit of a task that publishes a report to MLflow.
PUBLISH_SECONDS = 1800.0

# Options of tasks that read files or the network. A user's mistake does not go away with another try.
RETRY_IO: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    "retry_condition_fn": lambda _task, _task_run, state: not isinstance(state.data, UserError),
}


def read_complete(directory: Path) -> dict[str, Any] | None:
    """Return the pointer in a stage's directory when every file that it lists exists, else None."""
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
        *,
        name: str,
        version: int,
        sources: tuple[str, ...] = (),
        key_only: tuple[str, ...] = (),
        locations: tuple[str, ...] = (),
        **task_options: Any,
    ) -> None:
        self.function, self.name, self.version = function, name, version
        self.sources, self.key_only, self.locations = sources, key_only, locations
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
        """Return the digest of the code version and of all inputs but the locations."""
        missing = [name for name in self.key_only if name not in inputs]
        assert not missing, f"stage {self.name}: inputs {missing} are missing"
        decisive = {name: value for name, value in inputs.items() if name not in self.locations}
        return content_digest({"stage": self.name, "version": self.version, "inputs": decisive})

    def directory(self, storage_root: Path, inputs: dict[str, Any]) -> Path:
        """Return the directory of the outputs for these inputs, whether it exists or not."""
        return storage_root / "store" / self.name / self.key(inputs)

    def write(self, out: Path, **inputs: Any) -> dict[str, Any]:
        """Run the function alone, without key, pointer and Prefect; return its summary."""
        return self.function(
            out, **{name: value for name, value in inputs.items() if name not in self.key_only}
        )

    def __call__(
        self,
        storage_root: Path,
        *,
        label: str | None = None,
        after: Iterable[Any] = (),
        refresh: bool = False,
        **inputs: Any,
    ) -> Any:
        """Run the stage, or return its pointer at once when it is up to date.

        Args:
            storage_root: directory that holds `store/`.
            label: name of the task run.
            after: pointers that this stage builds on, so that Prefect draws the graph.
            refresh: run although nothing changed.
            inputs: inputs of the stage.

        Returns:
            The pointer; `tasks.storage.pointers` lists the fields of each stage's.
        """
        configured = self._configure(storage_root, inputs, refresh=refresh, submitted=False)
        return configured(**self._arguments(storage_root, inputs, label, after, refresh=refresh))

    def submit(
        self,
        storage_root: Path,
        *,
        label: str | None = None,
        after: Iterable[Any] = (),
        refresh: bool = False,
        **inputs: Any,
    ) -> PrefectFuture[Any]:
        """Do the same as a call, through the flow's task runner."""
        configured = self._configure(storage_root, inputs, refresh=refresh, submitted=True)
        return configured.submit(**self._arguments(storage_root, inputs, label, after, refresh=refresh))

    def _configure(
        self, storage_root: Path, inputs: dict[str, Any], *, refresh: bool, submitted: bool
    ) -> Any:
        """Return the task as it has to run now; each variant is made once, for making a task is slow."""
        is_stale = refresh or read_complete(self.directory(storage_root, inputs)) is None
        results = storage_root.resolve() / "prefect" / "storage"
        variant = (is_stale, submitted, results)
        if variant not in self._configured:
            # No time limit interrupts the thread of a submitted task; None keeps the limit of the stage.
            timeout_seconds = 0 if submitted else None
            self._configured[variant] = self.task.with_options(
                refresh_cache=is_stale, result_storage=results, timeout_seconds=timeout_seconds
            )
        return self._configured[variant]

    def _arguments(
        self,
        storage_root: Path,
        inputs: dict[str, Any],
        label: str | None,
        after: Iterable[Any],
        *,
        refresh: bool,
    ) -> dict[str, Any]:
        return {
            "storage_root": str(storage_root),
            "inputs": inputs,
            "key": self.key(inputs),
            "label": label or self.name,
            "refresh": refresh,
            "after": list(after),
        }

    def map(self, storage_root: Path, calls: Sequence[dict[str, Any]], *, refresh: bool = False) -> list[Any]:
        """Run one task per call through the flow's task runner; return the pointers in order.

        Even a cached task run costs Prefect 30 ms. Where more than `SHOWN_CACHED` calls are up to date, their
        pointers are read without a task run, and the log reports their number.

        Args:
            storage_root: directory that holds `store/`.
            calls: keywords of `submit` for each task, without `refresh`.
            refresh: run although nothing changed.

        Raises:
            TimeoutError: a task did not end within `STAGE_SECONDS` after the one before it.
        """
        up_to_date: dict[int, dict[str, Any]] = {}
        if not refresh:
            for i, call in enumerate(calls):
                inputs = {name: value for name, value in call.items() if name not in ("label", "after")}
                if (pointer := read_complete(self.directory(storage_root, inputs))) is not None:
                    up_to_date[i] = pointer
        if len(up_to_date) <= SHOWN_CACHED:
            up_to_date.clear()
        else:
            get_run_logger().info("%s: %d of %d are up to date", self.name, len(up_to_date), len(calls))
        futures = {
            i: self.submit(storage_root, refresh=refresh, **call)
            for i, call in enumerate(calls)
            if i not in up_to_date
        }
        return [
            up_to_date[i] if i in up_to_date else futures[i].result(timeout=STAGE_SECONDS)
            for i in range(len(calls))
        ]

    @redacted_exceptions()
    def produce(
        self,
        storage_root: str,
        inputs: dict[str, Any],
        *,
        key: str,
        label: str,
        refresh: bool,
        after: list[Any],
    ) -> dict[str, Any]:
        """Run the function and publish its outputs: the body of the Prefect task.

        Args:
            storage_root: directory that holds `store/`.
            inputs: all inputs of the stage.
            key: digest of the inputs, for Prefect's cache.
            label: name of the task run, for Prefect.
            refresh: run although nothing changed.
            after: pointers that this stage builds on, for Prefect's graph.
        """
        del label, after
        directory = Path(storage_root) / "store" / self.name / key
        if not refresh and (pointer := read_complete(directory)) is not None:
            return pointer
        with publish_directory(directory) as out:
            summary = self.write(out, **inputs)
            pointer = {
                "stage": self.name,
                "version": self.version,
                "key": key,
                "path": directory.relative_to(storage_root).as_posix(),
                "files": sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()),
                **summary,
            }
            write_json(out / POINTER, pointer)
        return pointer


STAGES: dict[str, Stage] = {}


def stage(
    name: str,
    *,
    version: int,
    sources: tuple[str, ...] = (),
    key_only: tuple[str, ...] = (),
    locations: tuple[str, ...] = (),
    timeout_seconds: float | None = STAGE_SECONDS,
    **task_options: Any,
) -> Callable[[Callable[..., dict[str, Any]]], Stage]:
    """Make a stage of `function(out, **inputs) -> summary`; see the module's docstring.

    Args:
        name: the stage's name, also of its Prefect task and of its directory under `store/`.
        version: code version; raise it whenever equal inputs could now give other outputs.
        sources: modules or packages of dflash_core whose code decides the outputs; a test holds their digest.
        key_only: inputs that are part of the key and are not passed to the function.
        locations: inputs that are passed to the function and are not part of the key: places and speeds.
        timeout_seconds: time after which the task ends as TimedOut; None where the work sets its own limits.
        task_options: options of the Prefect task, such as retries.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> Stage:
        STAGES[name] = Stage(
            function,
            name=name,
            version=version,
            sources=sources,
            key_only=key_only,
            locations=locations,
            timeout_seconds=timeout_seconds,
            **task_options,
        )
        return STAGES[name]

    return decorate
