"""What training reads of the target for a microbatch, and the optional cache that keeps it between epochs.

The cache holds samples, not microbatches, so any plan can use it; but it fills by the microbatches of the
first plan. A sample's states depend in the last bits on what it was captured with (matrix products round by
shape), so a sample captured one way before a kill and another way after it would break bit-equal resume. With
fixed groups a sample's cached states are a function of the first plan alone, and the first epoch captures
nothing it does not train on.

Shape letters: T packed tokens, F = captured layers x target width, D target width.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.config import ObjectiveConfig
from dflash_core.microbatch import Features, Microbatch
from dflash_core.target.labels import target_labels
from dflash_core.target.target import Target


class Capture(Protocol):
    """Anything that gives the features of a microbatch."""

    def __call__(self, microbatch: Microbatch) -> Features: ...


class TargetCapture:
    """Runs the target: only up to the last captured layer when labels are the data's tokens."""

    def __init__(self, target: Target, objective: ObjectiveConfig) -> None:
        self.target = target
        self.want_labels, self.want_last = objective.labels == "target", objective.loss == "kl"

    def __call__(self, microbatch: Microbatch) -> Features:
        return self.run(microbatch.token_ids, microbatch.loss_mask, microbatch.cu_seqlens, microbatch.width)

    def run(
        self,
        token_ids: NDArray[np.int64],
        loss_mask: NDArray[np.uint8],
        cu_seqlens: NDArray[np.int32],
        width: int,
    ) -> Features:
        captured = self.target.capture(
            token_ids, cu_seqlens, width, want_last_hidden=self.want_labels or self.want_last
        )
        labels = None
        if self.want_labels:
            assert captured.last_hidden is not None
            device = captured.last_hidden.device
            mask, bounds = torch.from_numpy(loss_mask).to(device), torch.from_numpy(cu_seqlens).to(device)
            labels = target_labels(captured.last_hidden, self.target.head_weight, mask, bounds)
        last_hidden = captured.last_hidden if self.want_last else None
        return Features(captured.features, labels, last_hidden).ready_for_backward()
