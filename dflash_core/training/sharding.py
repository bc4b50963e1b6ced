"""Placement of a drafter's weights on the ranks that train: replicated (`ddp`) or sharded by FSDP2 (`fsdp2`).

Replicated: every rank holds weights, optimizer and one flat gradient; gradients are summed once per step.

Sharded: master weights and both AdamW moments, three quarters of the memory, are split over the ranks. The
whole weights are gathered once per step and stay until the step's gradient is complete; then one backward
pass over an empty microbatch, the same on every rank, sums and scatters the gradients. So here, too, ranks
may run different numbers of microbatches and chunks: no collective depends on them.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.launch.process_groups import World
from dflash_core.microbatch import FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings, microbatch_loss
from dflash_core.training.optim import Gradients, ShardedGradients


def place_drafter(
    drafter: DFlashDrafter, world: World, parallel: str, loss_settings: LossSettings, spec: FeatureSpec
) -> Gradients | ShardedGradients:
    """Prepare a drafter for training, in place; return its step gradient.

    Args:
        drafter: equal on all ranks.
        world: its `gradients` group is the one that shares the weights.
        parallel: `ddp` or `fsdp2`; a single rank always holds everything.
        loss_settings: for the empty pass of sharded weights.
        spec: for the empty pass of sharded weights.
    """
    if parallel == "ddp" or world.gradients is None or dist.get_world_size(world.gradients) == 1:
        return Gradients(p for p in drafter.parameters() if p.requires_grad)
    mesh = DeviceMesh.from_group(world.gradients, world.device.type)
    fully_shard(drafter, mesh=mesh, reshard_after_forward=False)
    for method in ("project_context", "project_layers", "forward_blocks"):
        register_fsdp_forward_method(drafter, method)
    sharded = cast(FSDPModule, drafter)
    sharded.set_gradient_divide_factor(1.0)  # sums; the step divides by its summed weights
    sharded.set_force_sum_reduction_for_comms(True)

    def accumulate() -> None:
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)

    def reduce() -> None:
        # A pass is two backward passes (blocks, context), and FSDP reduces the gradients that exist then. So
        # a rank without a microbatch needs all of them, like the others, before the first pass that reduces.
        _empty_pass(drafter, loss_settings, spec)
        sharded.set_requires_gradient_sync(True)
        sharded.set_reshard_after_backward(True)
        _empty_pass(drafter, loss_settings, spec)
        accumulate()

    accumulate()
    return ShardedGradients(drafter.parameters(), sharded, reduce)


def _empty_pass(drafter: DFlashDrafter, loss_settings: LossSettings, spec: FeatureSpec) -> None:
    """Run forward and backward on one token without an anchor: every weight gets a zero gradient."""
    no_anchors = np.zeros(0, np.int32)
    microbatch = Microbatch(
        sample_rows=np.zeros(1, np.int32),
        token_ids=np.zeros(1, np.int64),
        loss_mask=np.zeros(1, np.uint8),
        cu_seqlens=np.array([0, 1], np.int32),
        width=0,
        anchors=no_anchors,
        anchor_sample=no_anchors,
    )
    features = spec.empty(1, loss_settings.device).zeros()
    microbatch_loss(drafter, microbatch, features, loss_settings, backward=True)


def full_weights(drafter: DFlashDrafter) -> dict[str, torch.Tensor]:
    """Return all weights, gathered on the CPU; every drafter rank must call it."""
    weights = {}
    for name, p in drafter.named_parameters():
        tensor = p.detach()
        weights[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()
    return weights
