"""Predicted seconds of a plan, from a few constants of the machine.

Cost of a microbatch in the frozen target: its slots, its attention pairs, its real tokens (logits where the
target gives the labels, and copies of captured states) and a constant. In the drafter: its real tokens
(context projections), its draft slots (layers and vocabulary), the pairs of draft slot and context position,
and a constant. The constants come from measured microbatches (`CostModel.fit`) or from floating-point
operations (`CostModel.from_shapes`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counted work of each microbatch, all int64[n].

    slots: slots that the target's forward computes: real tokens when packed, rows * width when padded.
    pairs: sum of squared row lengths (attention is causal: half of them are computed).
    tokens: real tokens.
    draft_slots: sum of draft slots.
    draft_pairs: sum of draft slots * sample length (a draft slot sees half of its sample on average).
    """

    slots: NDArray[np.int64]
    pairs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    draft_slots: NDArray[np.int64]
    draft_pairs: NDArray[np.int64]

    def matrix(self) -> NDArray[np.float64]:
        """Return float64[n, 5], columns in the order of the fields."""
        return np.stack([getattr(self, f.name) for f in fields(self)], axis=1).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds per unit of work on one device."""

    capture_slot: float
    capture_pair: float
    capture_token: float = 0.0
    capture_microbatch: float
    train_token: float
    train_draft_slot: float
    train_draft_pair: float
    train_microbatch: float

    def parts(self, work: Work) -> dict[str, NDArray[Any]]:
        """Return predicted seconds of each microbatch by part; the parts add up to `seconds`."""
        ones = np.ones(len(work.slots))
        return {
            "capture_slots": self.capture_slot * work.slots,
            "capture_attention": self.capture_pair * work.pairs,
            "capture_labels": self.capture_token * work.tokens,
            "capture_fixed": self.capture_microbatch * ones,
            "train_context": self.train_token * work.tokens,
            "train_draft_slots": self.train_draft_slot * work.draft_slots,
            "train_attention": self.train_draft_pair * work.draft_pairs,
            "train_fixed": self.train_microbatch * ones,
        }

    def seconds(self, work: Work) -> NDArray[np.float64]:
        """Return predicted seconds of each microbatch, capture and training together: float64[n]."""
        parts = list(self.parts(work).values())
        total = parts[0].copy()
        for part in parts[1:]:  # one order of summation everywhere: the assignment to ranks depends on it
            total += part
        return total

    @classmethod
    def fit(
        cls, work: Work, *, capture_seconds: NDArray[np.float64], train_seconds: NDArray[np.float64]
    ) -> CostModel:
        """Fit the constants to measured microbatches: non-negative least squares of the relative error.

        Args:
            work: of the measured microbatches; different shapes are needed to separate the constants (a short
                one, a long one, many short rows, few long rows).
            capture_seconds, train_seconds: float64[n], measured, above 0.

        Raises:
            UserError: fewer than two measurements, or one that is not positive.
        """
        count = len(work.slots)
        if count < 2 or len(capture_seconds) != count or len(train_seconds) != count:
            raise UserError(
                f"measured microbatches: {count} is not allowed; allowed: at least 2, all with both times"
            )
        if not (np.min(capture_seconds) > 0 and np.min(train_seconds) > 0):
            least = min(np.min(capture_seconds), np.min(train_seconds))
            raise UserError(f"measured seconds: {least} is not allowed; allowed: above 0 in every microbatch")
        ones = np.ones(count)
        capture = _nonnegative([work.slots, work.pairs, work.tokens, ones], capture_seconds)
        train = _nonnegative([work.tokens, work.draft_slots, work.draft_pairs, ones], train_seconds)
        names = [f.name for f in fields(cls)]
        return cls(**dict(zip(names, map(float, (*capture, *train)))))

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
        label_share: float = 0.0,
        flops_per_second: float = 4e14,
        seconds_per_microbatch: float = 5e-3,
    ) -> CostModel:
        """Derive the constants from matrix shapes; defaults: an 8B target, run to its last captured layer.

        A product of [m, k] and [k, n] is 2 m k n operations; backward adds two more of the same size where
        both sides need gradients, one where only one does (frozen head; captured states).

        Args:
            target_layers: layers of the target that are run.
            hidden_size, intermediate_size, kv_size, vocab_size: of target and drafter; kv_size of keys, or
                values, in all heads.
            num_captured_layers, draft_layers: of the drafter.
            label_share: share of tokens whose label is the target's argmax (`objective.labels: target`).
            flops_per_second: sustained speed of the device.
            seconds_per_microbatch: constant of a microbatch, once for the target and once for the drafter.
        """
        layer = 2 * hidden_size * (2 * hidden_size + 2 * kv_size + 3 * intermediate_size)
        context = 2 * hidden_size * (num_captured_layers * hidden_size + draft_layers * 2 * kv_size)
        head = 2 * hidden_size * vocab_size
        attention = 4 * hidden_size  # scores and values, for one pair and layer
        return cls(
            capture_slot=target_layers * layer / flops_per_second,
            capture_pair=target_layers * attention / 2 / flops_per_second,
            capture_token=label_share * head / flops_per_second,
            capture_microbatch=seconds_per_microbatch,
            train_token=2.5 * context / flops_per_second,
            train_draft_slot=(3 * draft_layers * layer + 2 * head) / flops_per_second,
            train_draft_pair=3.5 * draft_layers * attention / 2 / flops_per_second,
            train_microbatch=seconds_per_microbatch,
        )


REFERENCE = CostModel.from_shapes()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted device seconds of a whole plan, by part, and the real tokens they process."""

    parts: dict[str, float]
    num_tokens: int

    @property
    def capture_seconds(self) -> float:
        return sum(seconds for name, seconds in self.parts.items() if name.startswith("capture"))

    @property
    def train_seconds(self) -> float:
        return sum(seconds for name, seconds in self.parts.items() if name.startswith("train"))

    @property
    def seconds(self) -> float:
        """Seconds of one device that captures and trains without overlap."""
        return self.capture_seconds + self.train_seconds


def predict(work: Work, model: CostModel = REFERENCE) -> Prediction:
    """Predict the device seconds of all microbatches of `work` (of a plan: `plan.work`)."""
    parts = {name: float(seconds.sum()) for name, seconds in model.parts(work).items()}
    return Prediction(parts=parts, num_tokens=int(work.tokens.sum()))


def _nonnegative(columns: list[NDArray[Any]], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients >= 0 with the least squared relative error, over all subsets of columns."""
    scaled = np.stack(columns, axis=1) / np.asarray(seconds, np.float64)[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    best, best_error = np.zeros(len(columns)), np.inf
    for size in range(1, len(columns) + 1):
        for subset in itertools.combinations(range(len(columns)), size):
            chosen = list(subset)
            solution = np.linalg.lstsq(scaled[:, chosen] / norms[chosen], np.ones(len(scaled)), rcond=1e-9)[0]
            if (solution < 0).any():
                continue
            error = float(((scaled[:, chosen] / norms[chosen] @ solution - 1) ** 2).sum())
            if error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(len(columns)), error
                best[chosen] = solution / norms[chosen]
    return best
