"""Stages: tasks whose outputs are kept under a digest of what decides them, and rerun only when that changes.

A stage is a plain function `function(out: Path, **inputs) -> dict` that writes files into `out` and returns a
small summary. `@stage(...)` adds what every stage needs:

* the key: the digest of the inputs (content digests and settings, never paths or times) and of the stage's
  code version.
* the directory: `<storage_root>/store/<stage>/<key>/`, published complete or not at all.
* the pointer: JSON with the summary, the key and the directory relative to the storage root. It is also kept
  next to the files as `pointer.json`: a stage is up to date exactly when its pointer and every file that it
  lists exist, with the size that was written. Damaged outputs are made anew, with a remark.
* versions of libraries: recorded in the pointer; `tasks.storage.provenance` has the rule by which they count.
* a Prefect task of the same name with the key as its cache key, so that the UI shows what was cached.

Guarantee: Prefect's own cache never decides alone. Outputs that are gone rerun the stage, and outputs that
exist are used although Prefect has forgotten them. Price: about 30 ms of Prefect per task run, cached or not
(see `Stage.map`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.serializers import JSONSerializer

from dflash_core.errors import UserError
from dflash_core.files import content_digest, publish_directory, write_json
from dflash_core.redaction import redacted_exceptions
from tasks.storage.live_runs import mark_used
from tasks.storage.pointers import POINTER, read_complete, read_pointer
from tasks.storage.provenance import changed_versions, minor_versions, versions

# Number of cached task runs of one stage that a flow run shows.
SHOWN_CACHED = 20
# Number of task runs of one `Stage.map`.
MOST_TASKS = 200
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


# Of Prefect's records of results: plain JSON, which names no class to import.
RECORDS = JSONSerializer(object_encoder=None, object_decoder=None)

log = logging.getLogger("prefect.train_dflash.stages")


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
        libraries: tuple[str, ...] = (),
        is_costly: bool = False,
        **task_options: Any,
    ) -> None:
        self.function, self.name, self.version = function, name, version
        self.sources, self.key_only, self.locations = sources, key_only, locations
        self.libraries, self.is_costly = libraries, is_costly
        # Remarks about versions that this process has made.
        self._remarks: set[str] = set()
        self.__doc__ = function.__doc__
        self._configured: dict[tuple[bool, bool, Path], Any] = {}
        self.task = task(
            name=name,
            task_run_name="{label}",
            cache_key_fn=lambda _context, parameters: f"{name}-{parameters['key']}",
            persist_result=True,
            result_serializer=RECORDS,
            **task_options,
        )(self.produce)
        self.group_task = task(
            name=name,
            task_run_name="{label}",
            cache_policy=NO_CACHE,
            persist_result=False,
            **task_options,
        )(self.produce_group)

    def key(self, inputs: dict[str, Any]) -> str:
        """Return the digest of the code version, of all inputs but the locations, and of the libraries.

        Libraries count by major and minor version, and not at all where the stage is costly.
        """
        missing = [name for name in self.key_only if name not in inputs]
        assert not missing, f"stage {self.name}: inputs {missing} are missing"
        decisive = {name: value for name, value in inputs.items() if name not in self.locations}
        decides = {"stage": self.name, "version": self.version, "inputs": decisive}
        if self.libraries and not self.is_costly:
            decides["libraries"] = minor_versions(self.libraries)
        return content_digest(decides)

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
        results = storage_root.resolve() / "prefect" / "storage"
        directory = self.directory(storage_root, inputs)
        is_stale = refresh or self._read(directory) is None
        # Not even opened by Prefect: the task then finds its outputs by itself.
        is_stale = is_stale or not _is_plain_record(results / f"{self.name}-{directory.name}")
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
            "after": list(after)[:MOST_TASKS],
        }

    def map(self, storage_root: Path, calls: Sequence[dict[str, Any]], *, refresh: bool = False) -> list[Any]:
        """Run one task per call through the flow's task runner; return the pointers in order.

        Even a cached task run costs Prefect 30 ms. Where more than `SHOWN_CACHED` calls are up to date, their
        pointers are read without a task run, and the log reports their number. Where more than `MOST_TASKS`
        calls have to run, a task runs several of them in turn; each output still has its own key.

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
                if (pointer := self._read(self.directory(storage_root, _inputs_of(call)))) is not None:
                    up_to_date[i] = pointer
        if len(up_to_date) <= SHOWN_CACHED:
            up_to_date.clear()
        else:
            get_run_logger().info("%s: %d of %d are up to date", self.name, len(up_to_date), len(calls))
        stale = [i for i in range(len(calls)) if i not in up_to_date]
        if len(stale) > MOST_TASKS:
            return self._map_groups(storage_root, calls, up_to_date, stale, refresh=refresh)
        futures = {i: self.submit(storage_root, refresh=refresh, **calls[i]) for i in stale}
        return [
            up_to_date[i] if i in up_to_date else futures[i].result(timeout=STAGE_SECONDS)
            for i in range(len(calls))
        ]

    def _map_groups(
        self,
        storage_root: Path,
        calls: Sequence[dict[str, Any]],
        known: dict[int, dict[str, Any]],
        stale: list[int],
        *,
        refresh: bool,
    ) -> list[Any]:
        """Run the stale calls in `MOST_TASKS` task runs of neighbours; return all pointers in order."""
        size = -(-len(stale) // MOST_TASKS)
        groups = [stale[i : i + size] for i in range(0, len(stale), size)]
        run_group = self.group_task.with_options(timeout_seconds=0)
        futures = [
            run_group.submit(
                [
                    self._arguments(storage_root, _inputs_of(calls[i]), None, (), refresh=refresh)
                    for i in group
                ],
                label=f"{self.name} {group[0] + 1} to {group[-1] + 1} of {len(calls)}",
                after=list(calls[group[0]].get("after", ())),
            )
            for group in groups
        ]
        for group, future in zip(groups, futures):
            known |= zip(group, future.result(timeout=STAGE_SECONDS))
        return [known[i] for i in range(len(calls))]

    def produce_group(
        self, group: list[dict[str, Any]], *, label: str, after: list[Any]
    ) -> list[dict[str, Any]]:
        """Call `produce` for each item of a group: the body of a Prefect task for many small outputs."""
        del label, after
        return [self.produce(**arguments) for arguments in group]

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
        if not refresh and (pointer := self._read(directory)) is not None:
            return pointer

        def is_made() -> bool:
            # Another flow, which was asked for the same, was faster.
            return not refresh and self._read(directory) is not None

        with publish_directory(directory, is_kept=is_made) as out:
            summary = self.write(out, **inputs)
            pointer = {
                "stage": self.name,
                "version": self.version,
                "key": key,
                "path": directory.relative_to(storage_root).as_posix(),
                "files": {
                    p.relative_to(out).as_posix(): p.stat().st_size
                    for p in sorted(out.rglob("*"))
                    if p.is_file()
                },
                "made_with": versions(self.libraries),
                **summary,
            }
            write_json(out / POINTER, pointer)
        return read_complete(directory) or pointer

    def _read(self, directory: Path) -> dict[str, Any] | None:
        """Return the pointer of outputs that are complete, else None; remark on damage and other versions.

        Marks the directory as used by this flow run.
        """
        mark_used(directory)
        pointer = read_pointer(directory)
        if isinstance(pointer, str):
            if directory.exists():
                self._remark(f"{directory}: {pointer}; it is made anew")
            return None
        if changed := changed_versions(pointer.get("made_with")):
            self._remark(
                f"output of other versions is kept ({changed}); refresh=[{self.name!r}] makes it anew"
            )
        return pointer

    def _remark(self, text: str) -> None:
        """Log a remark once per process: a stage may have many outputs, and reads each several times."""
        if text not in self._remarks:
            self._remarks.add(text)
            log.warning("%s: %s", self.name, text)


def _is_plain_record(path: Path) -> bool:
    """Return True unless a record of Prefect's asks for another serializer than `RECORDS`.

    Prefect reads a record with the serializer that the record itself names: a pickle in a storage root that
    was copied from a stranger would be executed. A record that does not exist is plain.
    """
    try:
        serializer = json.loads(path.read_bytes())["metadata"]["serializer"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return bool(serializer == RECORDS.model_dump())


def _inputs_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the stage among the keywords of `submit`."""
    return {name: value for name, value in call.items() if name not in ("label", "after")}


STAGES: dict[str, Stage] = {}


def stage(
    name: str,
    *,
    version: int,
    sources: tuple[str, ...] = (),
    key_only: tuple[str, ...] = (),
    locations: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    is_costly: bool = False,
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
        libraries: distributions whose version can change the outputs.
        is_costly: outputs that take hours are kept, with a remark, when a library has another version.
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
            libraries=libraries,
            is_costly=is_costly,
            timeout_seconds=timeout_seconds,
            **task_options,
        )
        return STAGES[name]

    return decorate
