"""Capture: the target's features of a microbatch, as training reads them.

Policy: one forward of the target per microbatch. It stops behind the last captured layer when labels are the
data's tokens, and runs all layers when the objective needs the target's labels or its last hidden state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.config import ObjectiveConfig
from dflash_core.errors import UserError
from dflash_core.microbatch import Features, Microbatch
from dflash_core.target.labels import label_rows, target_labels
from dflash_core.target.target import Target


class Capture(Protocol):
    """Anything that gives the features of a microbatch."""

    def __call__(self, microbatch: Microbatch) -> Features: ...


class TargetCapture:
    """Capture by running the target."""

    def __init__(self, target: Target, objective: ObjectiveConfig) -> None:
        self.target = target
        self.want_labels, self.want_last = objective.labels == "target", objective.loss == "kl"
        head = target.head
        if self.want_last and (head.bias_V is not None or head.cap is not None):
            term = "a bias" if head.cap is None else f"a soft cap of {head.cap:g}"
            raise UserError(
                f"objective.loss: 'kl' is not allowed for a target whose lm_head has {term}; allowed: "
                "cross_entropy"
            )

    def __call__(self, microbatch: Microbatch) -> Features:
        return self.run(microbatch.token_ids, microbatch.loss_mask, microbatch.cu_seqlens, microbatch.width)

    def run(
        self,
        token_ids: NDArray[np.int64],
        loss_mask: NDArray[np.uint8],
        cu_seqlens: NDArray[np.int32],
        width: int,
    ) -> Features:
        """Return the features of samples that need no anchors; arguments as in `Microbatch`."""
        want_last_hidden = self.want_labels or self.want_last
        if self.want_labels:
            # Before the forward pass: a copy behind it would wait for it.
            row_P = torch.from_numpy(label_rows(loss_mask, cu_seqlens)).to(self.target.device)
        features = self.target.capture(token_ids, cu_seqlens, width, want_last_hidden=want_last_hidden)
        if self.want_labels:
            assert features.last_hidden is not None
            head = self.target.head
            row_P = row_P.to(features.last_hidden.device)
            labels = target_labels(features.last_hidden, head.weight_VD, row_P, bias_V=head.bias_V)
            features = replace(features, labels=labels)
        if not self.want_last:
            features = replace(features, last_hidden=None)
        elif self.target.head.scale != 1.0:
            # The loss applies lm_head's weight alone.
            assert features.last_hidden is not None
            features = replace(features, last_hidden=features.last_hidden * self.target.head.scale)
        return features.ready_for_backward()
