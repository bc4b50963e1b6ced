"""The small files of a shard, checked against each other: a shard may be damaged, or come from a stranger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.errors import UserError

# Columns of samples.parquet that are read here, and their types.
SAMPLE_COLUMNS = {
    "sample_id": pa.binary(16),
    "source": pa.string(),
    "sequence_length": pa.int32(),
    "num_supervised_tokens": pa.int32(),
    "num_eligible_anchors": pa.int32(),
    "validation_key": pa.uint64(),
}


def read_samples(shard: Path) -> pa.Table:
    """Read and check samples.parquet, so that no number in it leads outside of the shard.

    Raises:
        UserError: it is damaged.
    """
    path = shard / "samples.parquet"
    try:
        table = pq.ParquetFile(path).read()
        for name, kind in SAMPLE_COLUMNS.items():
            column = table[name]
            if column.type != kind or column.null_count:
                raise ValueError(f"column {name} of {column.type} with {column.null_count} nulls")
        lengths = table["sequence_length"].to_numpy()
        for name in ("sequence_length", "num_eligible_anchors", "num_supervised_tokens"):
            values = table[name].to_numpy()
            if len(values) and (values.min() < 0 or (values > lengths).any()):
                raise ValueError(f"column {name} holds {values.min()} to {values.max()}")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); ingest the file again") from error
    return table


def read_offsets(shard: Path, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Read offsets.npy, which has to be the running sum of the lengths.

    Raises:
        UserError: it is not, or is damaged.
    """
    path = shard / "offsets.npy"
    try:
        offsets = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise UserError(f"{path}: damaged ({error}); ingest the file again") from error
    if offsets.dtype != np.int64 or not np.array_equal(
        offsets, np.append(0, np.cumsum(lengths, dtype=np.int64))
    ):
        raise UserError(
            f"{path}: not the running sum of the lengths in samples.parquet; ingest the file again"
        )
    return offsets


def check_size(path: Path, expected: int) -> None:
    """Check the bytes of a file of a shard.

    Raises:
        UserError: it has another number.
    """
    size = path.stat().st_size
    if size != expected:
        raise UserError(f"{path}: {size} bytes; allowed: {expected}, by offsets.npy; ingest the file again")
