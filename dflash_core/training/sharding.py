"""How a drafter's weights lie on the ranks that train: replicated (`ddp`), or sharded by FSDP2 (`fsdp2`).

Replicated: every rank holds weights, optimizer and one flat gradient, and sums gradients once a step.

Sharded: master weights and both AdamW moments, three quarters of the memory, are split over the ranks. The
whole weights are gathered once a step, and stay until the step's gradient is complete; then one backward pass
over an empty microbatch, the same on every rank, sums and scatters the gradients. So here, too, ranks may run
different numbers of microbatches and chunks: no collective hangs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.launch.process_groups import World
from dflash_core.training.optim import Gradients, ShardedGradients


def place_drafter(
    drafter: DFlashDrafter, world: World, parallel: str, empty_pass: Callable[[DFlashDrafter], object]
) -> Gradients | ShardedGradients:
    """Get a drafter ready for training, in place; returns what reduces its gradients once a step.

    Args:
        drafter: equal on all ranks.
        world: its `gradients` group is the one that shares the weights.
        parallel: `ddp` or `fsdp2`; one rank alone always holds everything.
        empty_pass: forward and backward of a microbatch without anchors: every weight gets a zero gradient.
    """
    if parallel == "ddp" or world.gradients is None or dist.get_world_size(world.gradients) == 1:
        return Gradients(p for p in drafter.parameters() if p.requires_grad)
    mesh = DeviceMesh.from_group(world.gradients, world.device.type)
    fully_shard(drafter, mesh=mesh, reshard_after_forward=False)
    for method in ("project_context", "project_layers", "forward_blocks"):
        register_fsdp_forward_method(drafter, method)
    sharded = cast(FSDPModule, drafter)
    sharded.set_gradient_divide_factor(1.0)  # sums; the step divides by its weights
    sharded.set_force_sum_reduction_for_comms(True)

    def accumulate() -> None:
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)

    def reduce() -> None:
        # A pass is two backward passes (blocks, context), and FSDP reduces what has a gradient by then: a
        # rank that ran no microbatch must have all of them, as the others do, before the first that reduces.
        empty_pass(drafter)
        sharded.set_requires_gradient_sync(True)
        sharded.set_reshard_after_backward(True)
        empty_pass(drafter)
        accumulate()

    accumulate()
    return ShardedGradients(drafter.parameters(), sharded, reduce)


def full_weights(drafter: DFlashDrafter) -> dict[str, torch.Tensor]:
    """All weights whole, on the CPU; every drafter rank must call it."""
    out = {}
    for name, p in drafter.named_parameters():
        tensor = p.detach()
        out[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()
    return out
