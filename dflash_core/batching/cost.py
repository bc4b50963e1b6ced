"""Predicted seconds of a plan, from a few constants of the machine.

A microbatch costs, in the frozen target, its slots, its attention pairs and something fixed; in the drafter,
its real tokens (context projections), its draft slots (layers and vocabulary), the pairs of draft slot and
context position, and something fixed. The constants come from measured microbatches (`fit`) or from
floating-point operations (`CostModel.from_shapes`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counted work of each microbatch, all int64[n].

    slots: what the target's forward computes: real tokens when packed, rows * width when padded.
    pairs: sum of squared row lengths (attention is causal: half of them are computed).
    tokens: real tokens. draft_slots: sum of draft slots. draft_pairs: sum of draft slots * sample length (a
    draft slot sees half of its sample on average).
    """

    slots: NDArray[np.int64]
    pairs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    draft_slots: NDArray[np.int64]
    draft_pairs: NDArray[np.int64]

    def matrix(self) -> NDArray[np.float64]:
        """float64[n, 5], columns in the order of the fields."""
        return np.stack([getattr(self, f.name) for f in fields(self)], axis=1).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds for each unit of work on one device."""

    capture_slot: float
    capture_pair: float
    capture_microbatch: float
    train_token: float
    train_draft_slot: float
    train_draft_pair: float
    train_microbatch: float

    def parts(self, work: Work) -> dict[str, NDArray[Any]]:
        """Predicted seconds of each microbatch by part; the parts add up to `seconds`."""
        ones = np.ones(len(work.slots))
        return {
            "capture_slots": self.capture_slot * work.slots,
            "capture_attention": self.capture_pair * work.pairs,
            "capture_fixed": self.capture_microbatch * ones,
            "train_context": self.train_token * work.tokens,
            "train_draft_slots": self.train_draft_slot * work.draft_slots,
            "train_attention": self.train_draft_pair * work.draft_pairs,
            "train_fixed": self.train_microbatch * ones,
        }

    def seconds(self, work: Work) -> NDArray[np.float64]:
        """float64[n]: predicted seconds of each microbatch, capture and training together."""
        parts = list(self.parts(work).values())
        total = parts[0].copy()
        for part in parts[1:]:  # one order of summation everywhere: the deal of ranks depends on it
            total += part
        return total

    @classmethod
    def from_shapes(
        cls,
        *,
        target_layers: int = 34,
        hidden_size: int = 4096,
        intermediate_size: int = 12_288,
        kv_size: int = 1024,
        vocab_size: int = 151_936,
        num_captured_layers: int = 5,
        draft_layers: int = 5,
        flops_per_second: float = 4e14,
        seconds_per_microbatch: float = 5e-3,
    ) -> CostModel:
        """Constants from matrix shapes alone; the defaults are an 8B target (layers run until the last
        captured one).

        A product of [m, k] and [k, n] is 2 m k n operations; backward adds two more of the same size where
        both sides need gradients, one where only one does (frozen head; captured states).
        """
        layer = 2 * hidden_size * (2 * hidden_size + 2 * kv_size + 3 * intermediate_size)
        context = 2 * hidden_size * (num_captured_layers * hidden_size + draft_layers * 2 * kv_size)
        head = 2 * hidden_size * vocab_size
        attention = 4 * hidden_size  # scores and values, for one pair and layer
        return cls(
            capture_slot=target_layers * layer / flops_per_second,
            capture_pair=target_layers * attention / 2 / flops_per_second,
            capture_microbatch=seconds_per_microbatch,
            train_token=2.5 * context / flops_per_second,
            train_draft_slot=(3 * draft_layers * layer + 2 * head) / flops_per_second,
            train_draft_pair=3.5 * draft_layers * attention / 2 / flops_per_second,
            train_microbatch=seconds_per_microbatch,
        )


REFERENCE = CostModel.from_shapes()
