"""Contents of each stage's pointer: the JSON that flows pass from task to task instead of data.

Pointers are typed dictionaries, not dataclasses, for two reasons: Prefect draws the graph from the identity
of the object that one task returned and another received, and the pointers of earlier runs, in pointer.json
and in Prefect's results, are plain JSON.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from dflash_core.config import RunConfig

POINTER = "pointer.json"


class Pointer(TypedDict):
    """Fields of every stage's pointer."""

    stage: str
    version: int
    key: str
    # Directory of the outputs, relative to the storage root.
    path: str
    # Files in it, relative to it, and the bytes of each.
    files: dict[str, int]
    # Versions of the libraries that can change the outputs.
    made_with: dict[str, str]


class TargetPointer(Pointer):
    """Stage `target`: the model is in `model/`."""

    fingerprint: str
    tokenizer_fingerprint: str


class CheckedTargetPointer(TargetPointer):
    """Stage `check-target`: check.json, and the link `model/` to the model."""

    # `TargetCheck` as JSON types.
    check: dict[str, Any]


class RegeneratedPointer(Pointer):
    """Stage `regenerate`: one JSONL file, with counts of its rows and answers."""

    source: str
    file: str
    digest: str
    num_rows: int
    num_answers: int
    num_cut: int
    num_kept_turns: int
    num_refused: int
    # Rows that also hold the ids that the target chose, because their text encodes to others.
    num_rows_of_ids: int
    # Answers that are known as text alone, and whose text encodes to another number of ids.
    num_other_ids: int


class ShardPointer(Pointer):
    """Stage `ingest`: the shard is in `shard/`."""

    source: str
    format: str
    digest: str
    num_rows: int
    num_blank: int
    num_samples: int
    num_rejected: int
    # Among the rejected rows those over data.max_length; tokens lost with them and by cutting, at least.
    num_over_length: int
    num_over_length_tokens: int
    num_duplicates: int
    num_tokens: int
    # Number of rejected rows by reason, and of rows that were kept with a remark by remark.
    rejects: dict[str, int]
    notes: dict[str, int]


class ProfilePointer(Pointer):
    """Stage `profile`: profile.json."""

    # The row of sql/length_stats.sql.
    stats: dict[str, Any]
    histogram_digest: str


class EdgesPointer(Pointer):
    """Stage `edges`: edges.json and two plots."""

    edges: list[int]
    # None where the edges were given.
    expected_efficiency: float | None
    knee: int


class PlanPointer(Pointer):
    """Stage `plan`: epoch-NNN.parquet and metrics.json."""

    plan_digest: str
    epoch: int
    strategy: str
    metrics: dict[str, float]


class CalibrationPointer(Pointer):
    """Stage `calibrate`: calibration.json."""

    # Arguments of `CostModel`.
    constants: dict[str, float]
    num_microbatches: int


class EvaluationPointer(Pointer):
    """Stage `evaluate`: evaluation.json, records.jsonl and a plot."""

    evaluation: dict[str, Any]


class TrainedRun(TypedDict):
    """Result of the task `train`, which is not a stage: its outputs are in a run directory."""

    # "trained", "resumed" or "skipped".
    status: str
    # Absolute path of the run directory.
    run_dir: str
    key: str
    # The contents of summary.json.
    summary: dict[str, Any]
    mlflow_run_id: str
    experiment_id: str


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The ingested samples: shards with their pointers, and the split."""

    # Absolute directories of the shards that hold samples, in the order of the files.
    shards: list[str]
    # One pointer per file, also of files without samples.
    pointers: list[ShardPointer]
    # Digest of the token store: the shards in order, and the split.
    digest: str
    # A sample belongs to validation when its key is below this.
    validation_bound: int
    # Number of samples that repeat another one, of any file, token by token.
    num_repeats: int


def root_of(config: RunConfig) -> Path:
    """Return the storage root as an absolute path."""
    return Path(config.storage_root).expanduser().resolve()


def target_directory(config: RunConfig, pointer: TargetPointer) -> Path:
    """Return the directory of the materialised target."""
    return root_of(config) / pointer["path"] / "model"


def read_complete(directory: Path) -> dict[str, Any] | None:
    """Return the pointer in a stage's directory when every file that it lists is whole, else None."""
    pointer = read_pointer(directory)
    return None if isinstance(pointer, str) else pointer


def read_pointer(directory: Path) -> dict[str, Any] | str:
    """Return the pointer in a stage's directory, or the defect of its outputs in a few words."""
    try:
        pointer = json.loads((directory / POINTER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{POINTER} cannot be read ({error})"
    files = pointer.get("files") if isinstance(pointer, dict) else None
    if not isinstance(files, list | dict) or pointer.get("key") != directory.name:
        return f"{POINTER} is not the pointer of this output"
    # Pointers of earlier versions list the names alone.
    sizes = files if isinstance(files, dict) else dict.fromkeys(files)
    for name, size in sizes.items():
        try:
            status = os.stat(directory / name)
        except (OSError, ValueError) as error:
            return f"{name} cannot be read ({error})"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if size is not None and status.st_size != size:
            return f"{name} has {status.st_size} bytes, {size} were written"
    return pointer
