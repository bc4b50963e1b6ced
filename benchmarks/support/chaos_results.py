"""What a run of the pipeline leaves in its storage root: results, and what should not be there."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dflash_core.files import file_digest, file_sha256

# Figures of a report that depend on the speed of the machine, or name a run of MLflow.
MEASURED = {
    "tokens_per_second",
    "train_seconds",
    "capture_seconds",
    "drafter_seconds",
    "plain_tokens_per_second",
    "plain_seconds",
    "speculative_tokens_per_second",
    "speculative_seconds",
    "speedup",
    "speedup_interval",
    "mlflow_run_id",
}
# Hidden files that stay; every other hidden name is a temporary one, and so are checkpoints that end in .tmp.
HIDDEN_FILES = {".lock", ".start.lock", ".mlflow.lock", ".metadata"}
# Directories of Prefect's worker, which removes each some time after the end of its run. A worker that was
# killed leaves them; only their owner can read them.
OF_THE_WORKER = "prefect-workspace-attempt-"
# Directory of torch's compiler, one per user, which importing torch makes. The pipeline compiles nothing.
OF_TORCH = "torchinductor_"


def run_results(storage_root: Path, deployment: str = "quickstart") -> dict[str, Any]:
    """Return what has to be equal in every repetition of a run, by name.

    Raises:
        OSError, ValueError: something is missing or cannot be read.
    """
    storage_root = storage_root.resolve()
    run = (storage_root / deployment / "latest").resolve(strict=True)
    report = json.loads((run / "report.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    described = json.loads((run / "run.json").read_text())
    # Relative to the run's directory.
    plans = [(run / name).resolve(strict=True) for name in described["paths"]["plans"]]
    results = {
        "run_key": described["run_key"],
        "report": _without(report, MEASURED),
        "plans": {str(p.relative_to(storage_root)): file_digest(p) for p in plans},
        "losses": [[ln["step"], ln["train/loss"]] for ln in metrics if "train/loss" in ln],
        "validation": [[ln["step"], ln["validation/loss"]] for ln in metrics if "validation/loss" in ln],
        "drafter": file_sha256(run / "drafter" / "model.safetensors"),
    }
    if empty := [name for name, value in results.items() if not value]:
        raise ValueError(f"a run without {', '.join(empty)}: {run}")
    return results


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return [_without(v, names) for v in value] if isinstance(value, list) else value


def differences(results: Any, expected: Any, place: str = "") -> list[str]:
    """Return a line for each value that differs, with its place in nested mappings and lists."""
    if isinstance(results, dict) and isinstance(expected, dict):
        names = sorted({*results, *expected})
        parts = [(f"{place}.{name}".lstrip("."), results.get(name), expected.get(name)) for name in names]
    elif isinstance(results, list) and isinstance(expected, list) and len(results) == len(expected):
        parts = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(results, expected))]
    else:
        return [] if results == expected else [f"{place} differs: {results!r:.80}, expected {expected!r:.80}"]
    return [line for name, one, other in parts for line in differences(one, other, name)]


def defects(storage_root: Path, temporary: Path, database: Path | None = None) -> list[str]:
    """Return a line for everything that a finished run should not have left.

    Args:
        storage_root: of the run.
        temporary: the TMPDIR of its processes.
        database: of MLflow; None: that of the storage root.
    """
    return [
        *_temporary_files(storage_root, temporary),
        *_incomplete_entries(storage_root),
        *_open_notes(storage_root),
        *_wrong_tracking(storage_root, database or storage_root / "mlflow.db"),
    ]


def _temporary_files(storage_root: Path, temporary: Path) -> Iterator[str]:
    for parent, directories, names in os.walk(storage_root):
        for name in [*directories, *names]:
            if name not in HIDDEN_FILES and (name.startswith(".") or name.endswith(".tmp")):
                yield f"temporary left: {Path(parent, name).relative_to(storage_root)}"
    for path in temporary.iterdir():
        if not path.name.startswith((OF_THE_WORKER, OF_TORCH)):
            yield f"temporary left in TMPDIR: {path.name}"


def _incomplete_entries(storage_root: Path) -> Iterator[str]:
    for entry in sorted((storage_root / "store").glob("*/*/")):
        files = {p.relative_to(entry).as_posix() for p in entry.rglob("*") if p.is_file()} - {"pointer.json"}
        try:
            listed = set(json.loads((entry / "pointer.json").read_text())["files"])
        except (OSError, ValueError) as error:
            yield f"incomplete entry {entry.relative_to(storage_root)}: {error}"
            continue
        if listed != files:
            yield f"entry {entry.relative_to(storage_root)} has other files: {sorted(listed ^ files)}"


def _open_notes(storage_root: Path) -> Iterator[str]:
    for pattern in ("open-runs/*", "prefect/flow-runs/*", "live/*"):
        for note in storage_root.glob(pattern):
            yield f"note left: {note.relative_to(storage_root)}"


def _wrong_tracking(storage_root: Path, database: Path) -> Iterator[str]:
    """Compare MLflow's database with metrics.jsonl: one finished run per run key, one point per step."""
    expected = {}
    for path in storage_root.glob("*/*/finished.json"):
        if not path.parent.is_symlink():
            lines = (path.parent / "metrics.jsonl").read_text().splitlines()
            key = json.loads((path.parent / "run.json").read_text())["run_key"]
            expected[key] = sum("train/loss" in line for line in lines)
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        runs = connection.execute(
            "SELECT tags.value, runs.status, runs.run_uuid FROM runs JOIN tags USING (run_uuid) "
            "WHERE tags.key = 'run_key'"
        ).fetchall()
        for key, num_steps in expected.items():
            own = [(status, run_id) for run_key, status, run_id in runs if run_key == key]
            if [status for status, _ in own] != ["FINISHED"]:
                yield f"MLflow runs of {key[:12]}: {[status for status, _ in own]}"
                continue
            counted = connection.execute(
                "SELECT count(*), count(DISTINCT step) FROM metrics WHERE key = ? AND run_uuid = ?",
                ("train/loss", own[0][1]),
            )
            [(num_points, num_distinct)] = counted
            if (num_points, num_distinct) != (num_steps, num_steps):
                yield f"MLflow has {num_points} points for {num_distinct} of {num_steps} steps"
        for key, status, run_id in runs:
            if status == "RUNNING":
                yield f"MLflow run {run_id} of {key[:12]} is still RUNNING"


def family(token: str) -> list[psutil.Process]:
    """Return the living processes, zombies excepted, that inherited `DFLASH_CHAOS=token`."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get("DFLASH_CHAOS") == token:
                processes.append(process)
    return processes


# Role: a word of the command line of its processes, looked for in this order.
ROLES = {
    "launcher": "dflash_core.launch.launcher",
    "rank": "dflash_core.training.rank",
    "server": "flows.runtime.embedded_server",
    "flow": "flows.train_dflash",
}


def role_of(process: psutil.Process) -> str:
    """Return the role of a process in the pipeline, or `other`."""
    command = process.cmdline()
    return next((role for role, word in ROLES.items() if word in command), "other")
