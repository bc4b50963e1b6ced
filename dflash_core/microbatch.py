"""A microbatch of samples, and the target's states of it: what a target reads and what a drafter learns from.

Policy: only real tokens are stored, samples one after another. Padding exists inside the target's forward
alone, so the drafter, the loss and what travels between ranks never see it. A `Microbatch` holds numpy arrays
on the host, `Features` holds tensors on a device. `FeatureSpec` gives the shapes of features before any
target has run, so that a receiving rank allocates its buffers without being sent a shape.

Price: L * D values of the feature dtype per token (`FeatureSpec.bytes_per_token`), 5.8 KB for five layers of
width 576 in bfloat16.

Shape letters: T packed tokens, n samples, A anchors, F = captured layers x target width, D target width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.config import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Real tokens of n samples, concatenated.

    Samples of 3 and 2 tokens with one anchor each: cu_seqlens 0 3 5, anchors 1 3, anchor_sample 0 1.
    """

    sample_rows: NDArray[np.int32]  # [n] rows of the token store
    token_ids: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.uint8]  # [T]
    cu_seqlens: NDArray[np.int32]  # [n + 1]; sample i is rows cu_seqlens[i] to cu_seqlens[i + 1]
    # 0: the target's forward is packed; else the row length to which it pads.
    width: int
    anchors: NDArray[np.int32]  # [A] rows of T, ascending
    anchor_sample: NDArray[np.int32]  # [A] in 0..n-1

    @property
    def num_samples(self) -> int:
        return len(self.sample_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_slots(self) -> int:
        """Slots of the target's forward, padding included."""
        return self.num_samples * self.width or self.num_tokens


@dataclass(frozen=True)
class Features:
    """The target's states of one microbatch, rows as in its `token_ids`."""

    # [T, F] in the feature dtype, layers side by side in ascending order.
    hidden: Tensor
    # int64 [T], see `target_labels`; None: labels are the data's tokens.
    labels: Tensor | None = None
    # [T, D] after the final norm: what lm_head reads. None unless asked for.
    last_hidden: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are not None, in a fixed order that senders and receivers share."""
        return [t for t in (self.hidden, self.labels, self.last_hidden) if t is not None]

    def to(self, device: torch.device) -> Features:
        """Move all tensors to a device."""
        return self._each(lambda t: t.to(device))

    def zeros(self) -> Features:
        """Return zeros of these shapes."""
        return self._each(torch.zeros_like)

    def ready_for_backward(self) -> Features:
        """Copy tensors made in inference mode, which cannot be saved for a backward pass."""
        return self._each(lambda t: t.clone() if t.is_inference() else t)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Features:
        labels = None if self.labels is None else change(self.labels)
        last = None if self.last_hidden is None else change(self.last_hidden)
        return Features(change(self.hidden), labels, last)


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Shapes of `Features` as a function of the number of tokens, known on every rank before the run."""

    hidden_width: int  # F
    hidden_dtype: torch.dtype
    has_labels: bool
    last_width: int  # D, or 0: no last hidden state
    last_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        objective: ObjectiveConfig,
        *,
        layers: int,
        width: int,
        feature_dtype: torch.dtype,
        compute: torch.dtype,
    ) -> FeatureSpec:
        """Derive the shapes from what the objective needs.

        Args:
            objective: decides whether labels and last hidden states are captured.
            layers: captured layers.
            width: of the target, D.
            feature_dtype: of the captured states.
            compute: the target's dtype, in which its last hidden state stays.
        """
        return cls(
            hidden_width=layers * width,
            hidden_dtype=feature_dtype,
            has_labels=objective.labels == "target",
            last_width=width if objective.loss == "kl" else 0,
            last_dtype=compute,
        )

    def empty(self, num_tokens: int, device: torch.device) -> Features:
        """Allocate buffers to receive into."""
        labels = last = None
        if self.has_labels:
            labels = torch.empty(num_tokens, dtype=torch.int64, device=device)
        if self.last_width:
            last = torch.empty(num_tokens, self.last_width, dtype=self.last_dtype, device=device)
        hidden = torch.empty(num_tokens, self.hidden_width, dtype=self.hidden_dtype, device=device)
        return Features(hidden, labels, last)

    @property
    def bytes_per_token(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.empty(1, torch.device("cpu")).tensors())
