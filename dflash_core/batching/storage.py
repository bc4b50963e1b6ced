"""Plans as Parquet: one row per sample, in execution order, readable by any SQL engine.

Columns: sample int32, microbatch int32, step int32, width int32 (0 = packed), and of the row's whole
microbatch: tokens, squared_lengths, draft_slots, draft_pairs (int64). Repeated values are run-length encoded,
so they cost almost nothing. Settings, seed, epoch and digest are in the file's metadata under `batch_plan`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.batching.plan import BatchPlan
from dflash_core.config import BatchingConfig, from_dict, to_dict
from dflash_core.errors import UserError

_SUMS = ("tokens", "squared_lengths", "draft_slots", "draft_pairs")
_FIELDS = [(name, pa.int32()) for name in ("sample", "microbatch", "step", "width")]
_FIELDS += [(name, pa.int64()) for name in _SUMS]
_ROWS_PER_GROUP = 1 << 20


def save_plan(plan: BatchPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan; the file appears under its name only when it is complete."""
    path = Path(path)
    origin = {
        "config": to_dict(plan.config),
        "seed": plan.seed,
        "epoch": plan.epoch,
        "dropped": plan.dropped,
        "digest": plan.digest,
    }
    schema = pa.schema(_FIELDS, metadata={"batch_plan": json.dumps(origin)})
    step_of = plan.step_of_microbatch()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with pq.ParquetWriter(part, schema, compression="zstd") as writer:
            first = 0
            while first < plan.num_microbatches:  # whole microbatches, a bounded number of rows at a time
                row_limit = plan.offsets[first] + _ROWS_PER_GROUP
                last = int(np.searchsorted(plan.offsets, row_limit, side="right")) - 1
                last = max(first + 1, min(last, plan.num_microbatches))
                rows = plan.samples_per_microbatch[first:last]
                numbers = np.arange(first, last, dtype=np.int32)
                columns = [plan.order[plan.offsets[first] : plan.offsets[last]]]
                repeated = [numbers, step_of[first:last], plan.widths[first:last]]
                repeated += [getattr(plan, name)[first:last] for name in _SUMS]
                columns += [np.repeat(values, rows) for values in repeated]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=_ROWS_PER_GROUP * 2)
                first = last
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_plan(path: str | os.PathLike[str]) -> BatchPlan:
    """Read a plan that `save_plan` wrote.

    Raises:
        UserError: not a plan, damaged, or its content does not have the digest that it was written with.
    """
    try:
        return _load_plan(path)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
        allowed = "a batch plan as the stage `plan` writes it"
        raise UserError(f"{path}: damaged: {type(error).__name__}: {error}; allowed: {allowed}") from error


def _load_plan(path: str | os.PathLike[str]) -> BatchPlan:
    with pq.ParquetFile(path) as file:
        raw = (file.schema_arrow.metadata or {}).get(b"batch_plan")
        if raw is None:
            raise UserError(f"{path}: not a batch plan (no `batch_plan` in its metadata)")
        origin = json.loads(raw)
        if not file.schema_arrow.equals(pa.schema(_FIELDS)):
            raise ValueError(f"columns {file.schema_arrow.to_string(show_schema_metadata=False)!r}")
        microbatch = file.read(["microbatch"])["microbatch"].to_numpy()
        starts = np.flatnonzero(np.diff(microbatch, prepend=np.int32(-1)))
        offsets = np.append(starts, len(microbatch)).astype(np.int64)
        _check_numbers("microbatch", microbatch)
        del microbatch
        step_of = file.read(["step"])["step"].to_numpy()[starts]
        columns = {name: file.read([name])[name].to_numpy()[starts] for name in ("width", *_SUMS)}
        order = file.read(["sample"])["sample"].to_numpy()
    _check_numbers("step", step_of)
    for name, values in [("sample", order), *columns.items()]:
        if values.min(initial=0) < 0:
            raise ValueError(f"{name} {values.min()} below 0")
    step_starts = np.flatnonzero(np.diff(step_of, prepend=np.int32(-1)))
    plan = BatchPlan(
        order=order,
        offsets=offsets,
        step_offsets=np.append(step_starts, len(step_of)).astype(np.int64),
        widths=columns.pop("width"),
        **columns,
        config=from_dict(BatchingConfig, origin["config"]),
        seed=origin["seed"],
        epoch=origin["epoch"],
        dropped=origin["dropped"],
    )
    if plan.digest != origin["digest"]:
        raise UserError(
            f"{path}: damaged; its content has digest {plan.digest}, its metadata records {origin['digest']}"
        )
    return plan


def _check_numbers(name: str, numbers: NDArray[np.int32]) -> None:
    """Check that numbers start at 0 and rise by 0 or 1.

    Raises:
        ValueError: they do not.
    """
    rises = np.diff(numbers, prepend=np.int32(-1))
    if len(rises) and (rises[0] != 1 or rises.min() < 0 or rises.max() > 1):
        raise ValueError(f"column {name} does not count from 0 in steps of 1")
