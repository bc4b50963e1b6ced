"""AdamW over fp32 master weights, learning rate as a function of the step, and the gradient of a whole step.

A step's gradient is a sum over every microbatch of every rank divided by the step's summed weights. So
gradients are accumulated as they are, all-reduced once per step by sum, and scaled once: neither the number
of microbatches nor the number of ranks enters the result (an average per microbatch or per rank would weigh
short samples more).

`Gradients` is that step gradient for replicated weights: one flat fp32 buffer whose slices are the `.grad` of
the parameters, so that a step costs one all-reduce and one pass for the norm. `ShardedGradients` is the same
for weights sharded by FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dflash_core.config import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step`, 0-based; a pure function, so a resume cannot shift it.

    Warm-up takes W = ceil(warmup_share * total_steps) steps: lr * 1/W, 2/W, ..., 1. With 100 steps and a
    share of 0.04 the first five rates are 1/4, 2/4, 3/4, 4/4 and 1 times lr. Afterwards `cosine` falls to
    min_lr_share * lr, which it would reach at step `total_steps`; `wsd` holds lr and falls linearly to the
    same value over the last `decay_share` of all steps; `constant` holds lr.
    """
    warmup = math.ceil(config.warmup_share * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.min_lr_share
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        progress = (step - warmup) / max(1, total_steps - warmup)
        share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        decay = max(1, math.ceil(config.decay_share * total_steps))
        remaining = min(1.0, (total_steps - step) / decay)
        share = floor + (1 - floor) * max(0.0, remaining)
    return config.lr * share


def build_optimizer(drafter: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only: decay would pull norm weights (scales) to zero.

    Its moments are allocated here, so memory is as full before the first step as after it.
    """
    named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    matrices = [p for _, p in named if p.ndim >= 2]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, foreach=True
    )
    for _, p in named:
        zeros = (torch.zeros_like(p.detach()) for _ in range(2))
        optimizer.state[p] = {"step": torch.tensor(0.0), **dict(zip(("exp_avg", "exp_avg_sq"), zeros))}
    return optimizer


class Gradients:
    """The step gradient of replicated weights."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(total, dtype=torch.float32, device=self.parameters[0].device)
        offset = 0
        for p in self.parameters:
            assert p.dtype == torch.float32, "master weights are fp32"
            p.grad = self.flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()

    def gather_weights(self) -> None:
        """Do nothing: every rank has all weights already."""

    def scatter_weights(self) -> None:
        """Do nothing: every rank keeps all weights."""

    def zero(self) -> None:
        """Drop the accumulated gradient, also that of an abandoned step."""
        self.flat.zero_()

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the ranks that train."""
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(self.flat, op=dist.ReduceOp.SUM, group=group)

    def normalise(self, weight: float, clip_norm: float) -> torch.Tensor:
        """Divide by the step's summed weights and clip; return the norm before clipping, a scalar."""
        norm = torch.linalg.vector_norm(self.flat) / weight
        self.flat.mul_(torch.clamp(clip_norm / (norm + 1e-6), max=1.0) / weight)
        return norm


class ShardedGradients:
    """The step gradient of weights sharded by FSDP2; the function `reduce` sums and scatters it."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], sharded: FSDPModule, reduce: Callable[[], None]
    ) -> None:
        self.parameters, self._sharded, self._reduce = list(parameters), sharded, reduce

    def gather_weights(self) -> None:
        """Gather on all ranks at once, so that no forward pass waits for a rank that has none to run."""
        self._sharded.unshard()

    def scatter_weights(self) -> None:
        """Free the gathered weights; each rank keeps its share."""
        self._sharded.reshard()

    def zero(self) -> None:
        """Drop the summed gradient; that of an abandoned step is never reduced, for the run ends there."""
        for p in self.parameters:
            p.grad = None

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the ranks that train, the same ones that share the weights."""
        self._reduce()

    def normalise(self, weight: float, clip_norm: float) -> torch.Tensor:
        """Normalise like `Gradients`; the norm is that of the whole gradient."""
        shards = [cast(DTensor, p.grad).to_local() for p in self.parameters]
        total = torch.stack([shard.pow(2).sum() for shard in shards]).sum()
        dist.all_reduce(total, group=cast(DTensor, self.parameters[0]).device_mesh.get_group())
        norm = total.sqrt() / weight
        for shard in shards:
            shard.mul_(torch.clamp(clip_norm / (norm + 1e-6), max=1.0) / weight)
        return norm
