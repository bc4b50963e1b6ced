"""Shared by all steps: the data set that they pass on, and the paths under the storage root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime.deployments import FlowOptions
from tasks.storage.pointers import Pointer as Pointer
from tasks.storage.pointers import ShardPointer, TargetPointer
from tasks.storage.stages import STAGES


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


def check_options(options: FlowOptions) -> None:
    """Check the stages to refresh.

    Raises:
        UserError: one does not exist.
    """
    names = sorted((*STAGES, "train"))
    for name in options.refresh:
        if name not in names:
            raise UserError(f"refresh: {name!r} is not allowed; allowed: {', '.join(names)}")


def root_of(config: RunConfig) -> Path:
    """Return the storage root as an absolute path."""
    return Path(config.storage_root).expanduser().resolve()


def sample_tables(shards: Sequence[str]) -> list[Path]:
    """Return the paths of the shards' samples.parquet."""
    return [Path(shard) / "samples.parquet" for shard in shards]


def target_directory(config: RunConfig, pointer: TargetPointer) -> Path:
    """Return the directory of the materialised target."""
    return root_of(config) / pointer["path"] / "model"
