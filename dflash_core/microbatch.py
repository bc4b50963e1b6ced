"""TODO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.config import ObjectiveConfig


@dataclass(frozen=True)
class Features:
    """States of one microbatch, rows as in its `token_ids`."""

    hidden: Tensor  # [T, F] in the feature dtype
    labels: Tensor | None  # int64 [T], see `target_labels`; None: labels are the data's tokens
    last_hidden: Tensor | None  # [T, D]: what lm_head reads, for a KL objective

    def tensors(self) -> list[Tensor]:
        """Those that are there, in a fixed order (which senders and receivers share)."""
        return [t for t in (self.hidden, self.labels, self.last_hidden) if t is not None]

    def to(self, device: torch.device) -> Features:
        """Moved as a whole."""
        return self._each(lambda t: t.to(device))

    def zeros(self) -> Features:
        """Zeros of these shapes."""
        return self._each(torch.zeros_like)

    def ready_for_backward(self) -> Features:
        """Tensors made in inference mode cannot be saved for a backward pass: copy those."""
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
        return cls(
            hidden_width=layers * width,
            hidden_dtype=feature_dtype,
            has_labels=objective.labels == "target",
            last_width=width if objective.loss == "kl" else 0,
            last_dtype=compute,
        )

    def empty(self, num_tokens: int, device: torch.device) -> Features:
        """Buffers to receive into."""
        return Features(
            torch.empty(num_tokens, self.hidden_width, dtype=self.hidden_dtype, device=device),
            torch.empty(num_tokens, dtype=torch.int64, device=device) if self.has_labels else None,
            torch.empty(num_tokens, self.last_width, dtype=self.last_dtype, device=device)
            if self.last_width
            else None,
        )

    @property
    def bytes_per_token(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.empty(1, torch.device("cpu")).tensors())


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Real tokens of n samples, concatenated. Padding exists only inside the target's forward (`width`).

    Samples of 3 and 2 tokens with one anchor each: cu_seqlens 0 3 5, anchors 1 3, anchor_sample 0 1.
    """

    sample_rows: NDArray[np.int32]  # [n] rows of the token store
    token_ids: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.uint8]  # [T]
    cu_seqlens: NDArray[np.int32]  # [n + 1]
    width: int  # 0: packed; else the row length to which the target's forward pads
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
