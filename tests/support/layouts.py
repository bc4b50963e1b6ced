"""Training settings with ranks of both roles."""

from __future__ import annotations

from dflash_core.config import TrainingConfig


def split(targets: int, drafters: int, nodes: int = 1) -> TrainingConfig:
    """Return `split` settings with these numbers of ranks."""
    return TrainingConfig(
        topology="split", num_target_ranks=targets, num_drafter_ranks=drafters, num_nodes=nodes
    )
