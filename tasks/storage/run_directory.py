"""Run directories: `<storage_root>/<deployment>/<run key>/`, and the link `latest` to the newest one.

The run key is the digest of every field that decides the result of a training, so equal settings on equal
data meet the same directory: its training resumes, or is skipped when it is finished. Settings of execution
(topology, device, logging) are not in the key and may change on resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from dflash_core.config import RunConfig, decisive, to_dict
from dflash_core.drafter.directory import WEIGHTS_FILE, drafter_directory
from dflash_core.errors import UserError
from dflash_core.files import complete_file, content_digest, temporary_name, write_json
from tasks.storage import locks
from tasks.storage.file_digests import FileDigests
from tasks.storage.finished_runs import FINISHED, RESTORE, check_drafter
from tasks.storage.provenance import resume_remarks, training_provenance

# Characters of the run key in the name of a run's directory.
KEY_CHARACTERS = 12
# Name of each section of the config -> its class.
SECTIONS = {
    f.name: type(getattr(RunConfig(), f.name)) for f in fields(RunConfig) if f.default_factory is not MISSING
}


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Directory of one training; it may not exist yet."""

    path: Path
    # Digest of `fields`, 32 hex characters.
    key: str
    # Every field that decides the result, flat: "training.seed" -> 0.
    fields: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """True when the run has trained to its last step; `finished_runs` checks its outputs."""
        return (self.path / FINISHED).is_file()

    @property
    def has_checkpoint(self) -> bool:
        """True when the run has saved a checkpoint, complete or not."""
        return any((self.path / "checkpoints").glob("step-*"))


def decisive_fields(
    config: RunConfig, *, dataset_digest: str, plan_digests: list[str], target_fingerprint: str
) -> dict[str, Any]:
    """Return every field that decides the result of a training, flat; the run key is their digest.

    Data and batching settings enter through the shards and plans that they produced: another number of
    buckets is another run only where the strategy uses buckets.
    """
    settings = decisive(config)
    fields: dict[str, Any] = {
        "data": dataset_digest,
        "plans": plan_digests,
        "target": target_fingerprint,
        "target.feature_dtype": config.target.feature_dtype,
        "batching.strategy": config.batching.strategy,
    }
    for section in ("drafter", "objective", "optimizer", "training"):
        fields |= {f"{section}.{name}": value for name, value in settings[section].items()}
    if config.training.init_from is not None:
        fields["training.init_from"] = _drafter_digest(Path(config.training.init_from))
    return fields


def _drafter_digest(path: Path) -> str:
    """Return the digest of the weights at a path, since a path may come to hold other weights.

    Raises:
        UserError: the path is neither an exported drafter nor a run with one.
    """
    drafter, digests = drafter_directory(path, field="training.init_from"), FileDigests(path)
    check_drafter(drafter, digests)
    return digests.of(drafter / WEIGHTS_FILE)


def find_run(config: RunConfig, fields: dict[str, Any]) -> RunDirectory:
    """Return the directory of the run with these deciding fields."""
    key = content_digest(fields)
    path = Path(config.storage_root).resolve() / config.deployment / key[:KEY_CHARACTERS]
    return RunDirectory(path=path, key=key, fields=fields)


def write_run(
    run: RunDirectory, config: RunConfig, paths: dict[str, Any], *, total_steps: int, mlflow_run_id: str
) -> list[str]:
    """Write run.json: config, paths of the inputs, the fields behind the key, versions and code.

    On resume the execution settings are those of `config`, the deciding ones stay (see `keep_decisive`).
    Paths under the storage root are relative to the run's directory, so that the root may move.

    Returns:
        Remarks on the versions and the code of a run that resumes, where they differ from those before.
    """
    resolved, made_by = to_dict(config), training_provenance()
    earlier, remarks = read_run(run.path), list[str]()
    if earlier is not None and earlier.get("run_key") == run.key:
        resolved = keep_decisive(RunConfig, earlier["config"], resolved)
        remarks = resume_remarks(earlier, made_by) if run.has_checkpoint else []
    contents = {
        "config": resolved,
        "paths": _relative(paths, run.path),
        "run_key": run.key,
        "total_steps": total_steps,
        "mlflow_run_id": mlflow_run_id,
        "fields": run.fields,
        **made_by,
    }
    write_json(run.path / "run.json", contents)
    return remarks


def _relative(value: Any, run_directory: Path) -> Any:
    """Return paths, also those in lists and mappings, relative to a run's directory if under its root."""
    if isinstance(value, Mapping):
        return {name: _relative(item, run_directory) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(item, run_directory) for item in value]
    root = run_directory.parents[1]
    return os.path.relpath(value, run_directory) if Path(value).is_relative_to(root) else str(value)


def keep_decisive(section: type, earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return `now` with the deciding settings of `earlier`, for a run whose key is the same.

    A deciding setting outside the key can differ and still have produced the same shards and plans: a file
    that was moved, a number of buckets that this strategy does not use. Checkpoints hold the earlier values,
    and resume compares.
    """
    merged = dict(now)
    for f in fields(section):
        if section is RunConfig and f.name in SECTIONS:
            merged[f.name] = keep_decisive(SECTIONS[f.name], earlier.get(f.name, {}), now[f.name])
        elif not f.metadata.get("execution") and f.name in earlier:
            merged[f.name] = earlier[f.name]
    return merged


def latest_directory(config: RunConfig) -> Path:
    """Return the link to the deployment's latest run."""
    return Path(config.storage_root).resolve() / config.deployment / "latest"


def point_latest(directory: Path) -> str | None:
    """Make `latest`, next to a directory, a relative link to it by one rename; return its previous target."""
    link = directory.parent / "latest"
    previous = os.readlink(link) if link.is_symlink() else None
    with complete_file(link) as temporary:
        temporary.symlink_to(directory.name)
    return previous


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Make a run directory and hold its lock, so that one process at a time trains it or writes its report.

    Raises:
        UserError: another process holds it, and `wait` is False.
    """
    while (lock := _lock_of(directory, wait=wait)) is None:
        pass
    with lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def _lock_of(directory: Path, *, wait: bool) -> TextIO | None:
    """Return the locked file of a run, or None where its last holder has removed the directory meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    with contextlib.ExitStack() as closing:
        try:
            lock = closing.enter_context(path.open("a+"))
            locks.lock(lock, wait=wait)
            if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise UserError(f"run {directory} is in use by {holder}; wait for it or stop it") from None
        closing.pop_all()
        return lock


def empty(run: RunDirectory) -> None:
    """Remove everything of a run but its lock, which the caller holds."""
    for path in run.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def discard(run: RunDirectory, previous: str | None) -> None:
    """Remove a run that ended before its first checkpoint; `latest` links to the previous run again.

    Only the process that holds the lock of the run may call it.
    """
    if run.has_checkpoint:
        return
    link = run.path.parent / "latest"
    # Another flow may have started another run meanwhile.
    if link.is_symlink() and os.readlink(link) == run.path.name:
        if previous is not None and (link.parent / previous).is_dir():
            point_latest(link.parent / previous)
        else:
            link.unlink(missing_ok=True)
    hidden = temporary_name(run.path)
    run.path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def read_run(directory: Path) -> dict[str, Any] | None:
    """Return the contents of a run directory's run.json, or None where there is none that can be read."""
    try:
        contents = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) and {"fields", "config"} <= contents.keys() else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a file that a finished run needs.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; {RESTORE}") from error
    if not isinstance(contents, dict):
        raise UserError(f"{path} is not what this project wrote; {RESTORE}")
    return contents


def changed_fields(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one line per deciding field that differs: its name, and both values where they are readable.

    changed_fields({"seed": 0, "data": "a"}, {"seed": 1, "data": "a"}) == ["seed: 0 -> 1"]
    """
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before != after:
            is_digest = name in ("data", "plans", "target")
            lines.append(name if is_digest else f"{name}: {before!r} -> {after!r}")
    return lines


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run directory's metrics.jsonl, in order; none where there is no file."""
    try:
        text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    name = directory / "metrics.jsonl"
    try:
        read = [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} has a line that is not JSON: {error}; {RESTORE}") from error
    if not all(isinstance(line, dict) and {"step", "time_ms"} <= line.keys() for line in read):
        raise UserError(f"{name} has a line without step and time_ms; {RESTORE}")
    return read
