"""Mean loss of a run's initial weights over its first epoch, summed while the run trains.

Strategies differ in which samples share a microbatch, never in which samples and anchors an epoch holds, so
this number must be the same for all of them up to rounding, and `anchor_digest` exactly the same. It costs a
forward pass of the drafter on states that training captures anyway; its time is reported separately.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.files import bytes_digest
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.loss import LossSettings, LossSums, microbatch_loss

PHASE = "check the initial loss"


class InitialLoss:
    """The summed loss of microbatches under a copy of the initial weights.

    Args:
        drafter: with the weights that training starts from, before they are sharded.
        loss_settings: of the run.
    """

    def __init__(self, drafter: DFlashDrafter, loss_settings: LossSettings) -> None:
        self.drafter, self.loss_settings = copy.deepcopy(drafter).requires_grad_(False), loss_settings
        self.sums = LossSums.zeros(drafter.shape.block_size, loss_settings.device)
        self.num_samples = self.num_tokens = 0
        self.digest = np.zeros(4)  # sums of 32-bit words: independent of the order, and exact in float64

    @torch.no_grad()
    def add(self, microbatch: Microbatch, features: Features) -> None:
        """Add a microbatch of the first epoch."""
        self.sums = self.sums + microbatch_loss(
            self.drafter, microbatch, features, self.loss_settings, backward=False
        )
        self.num_samples += len(microbatch.sample_rows)
        self.num_tokens += microbatch.num_tokens
        for i, row in enumerate(microbatch.sample_rows):
            anchors = microbatch.anchors[microbatch.anchor_sample == i] - microbatch.cu_seqlens[i]
            digest = bytes_digest(np.int64(row).tobytes(), anchors.astype("<i4").tobytes())
            self.digest += np.frombuffer(bytes.fromhex(digest), "<u4")

    def result(self, sum_over_ranks: Callable[[list[float]], list[float]]) -> dict[str, Any]:
        """Return the contents of initial_loss.json; `anchor_digest` covers all samples and their anchors."""
        local = [float(self.sums.loss_sum), float(self.sums.weight_sum), float(self.sums.num_blocks)]
        local += [float(self.num_samples), float(self.num_tokens), *self.digest.tolist()]
        loss_sum, weight_sum, *counts = sum_over_ranks(local)
        num_blocks, num_samples, num_tokens, *words = (int(c) for c in counts)
        return {
            "loss": loss_sum / weight_sum if weight_sum else 0.0,
            "weight_sum": weight_sum,
            "num_blocks": num_blocks,
            "num_samples": num_samples,
            "num_tokens": num_tokens,
            "anchor_digest": "".join(f"{word:016x}" for word in words),
        }
