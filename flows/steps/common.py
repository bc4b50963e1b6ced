"""Shared by all steps: the check of the flow's options, and the tables of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_core.errors import UserError
from flows.runtime.deployments import FlowOptions
from tasks.storage.stages import STAGES


def check_options(options: FlowOptions) -> None:
    """Check the stages to refresh.

    Raises:
        UserError: one does not exist.
    """
    names = sorted((*STAGES, "train"))
    for name in options.refresh:
        if name not in names:
            raise UserError(f"refresh: {name!r} is not allowed; allowed: {', '.join(names)}")


def sample_tables(shards: Sequence[str]) -> list[Path]:
    """Return the paths of the shards' samples.parquet."""
    return [Path(shard) / "samples.parquet" for shard in shards]
