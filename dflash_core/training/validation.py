"""Validation on fixed samples with fixed anchors: the same blocks at every step, in every run on the same
data.

States are captured once at the start and kept (on the CPU when the run is on a GPU). Numbers are sums over
all drafter ranks, so they do not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_core.config import ObjectiveConfig
from dflash_core.model.drafter import DFlashDrafter
from dflash_core.model.loss import LossSums, TargetHeads, microbatch_loss
from dflash_core.training.capture import Features
from dflash_core.training.feed import Microbatch


@dataclass(frozen=True)
class LossArguments:
    """What is the same for every microbatch of a run."""

    heads: TargetHeads
    objective: ObjectiveConfig
    mask_token_id: int
    max_draft_slots: int
    device: torch.device


def loss_of(
    drafter: DFlashDrafter, microbatch: Microbatch, features: Features, same: LossArguments, *, backward: bool
) -> LossSums:
    """`microbatch_loss` of a microbatch and its captured states."""

    def on_device(array: object) -> torch.Tensor:
        return torch.as_tensor(array).to(same.device, non_blocking=True)

    return microbatch_loss(
        drafter,
        same.heads,
        features.hidden,
        on_device(microbatch.token_ids),
        on_device(microbatch.loss_mask),
        on_device(microbatch.cu_seqlens),
        on_device(microbatch.anchors),
        on_device(microbatch.anchor_sample),
        objective=same.objective,
        mask_token_id=same.mask_token_id,
        max_draft_slots=same.max_draft_slots,
        labels_T=features.labels,
        last_hidden=features.last_hidden,
        backward=backward,
    )


def accuracy_by_position(sums: LossSums, prefix: str) -> dict[str, float]:
    """`<prefix>/accuracy_position_k` for k = 1..B-1."""
    return {f"{prefix}/accuracy_position_{k}": a for k, a in enumerate(sums.accuracy_K()) if k > 0}


def validation_metrics(sums: LossSums) -> dict[str, float]:
    """The line of a validation: loss, accuracy by position, simulated acceptance length with its 95%
    interval.
    """
    mean, low, high = sums.acceptance_length()
    return {
        "validation/loss": sums.loss(),
        **accuracy_by_position(sums, "validation"),
        "validation/simulated_acceptance_length": mean,
        "validation/simulated_acceptance_length_low": low,
        "validation/simulated_acceptance_length_high": high,
    }
