"""What all steps share: the data set they hand on, where things are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime.deployments import FlowOptions
from tasks.storage.stages import STAGES

Pointer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The ingested samples: shards with their pointers, and the split."""

    shards: list[str]  # absolute directories, each content once, in the order of their names
    pointers: list[Pointer]
    digest: str  # of the token store: shards in order and the split
    validation_bound: int
    num_repeats: int  # samples that repeat another one, of any file, token by token


def check_options(options: FlowOptions) -> None:
    """Raises UserError for a stage that does not exist."""
    for name in options.refresh:
        if name not in (*STAGES, "train"):
            allowed = ", ".join(sorted((*STAGES, "train")))
            raise UserError(f"refresh: {name!r} is not allowed; allowed: {allowed}")


def root_of(config: RunConfig) -> Path:
    """The storage root, absolute."""
    return Path(config.storage_root).expanduser().resolve()


def target_directory(config: RunConfig, pointer: Pointer) -> Path:
    """Where the materialised target is."""
    return root_of(config) / pointer["path"] / "model"
