"""Speed of the two decoders on the same batches, which ran in turns.

A speed-up is a ratio of sums over all batches, (speculative tokens / seconds) / (plain tokens / seconds), and
its interval a percentile bootstrap over the batches, both decoders drawn together. The prefill counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.decoding.acceptance import central_95, resampled_sums


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One batch decoded both ways: which prompts, how many tokens, how many seconds."""

    prompts: tuple[int, ...]
    plain_tokens: int
    plain_seconds: float
    speculative_tokens: int
    speculative_seconds: float

    def sums(self) -> tuple[float, float, float, float]:
        """Return tokens and seconds of plain, then of speculative decoding."""
        plain = self.plain_tokens, self.plain_seconds
        return *plain, self.speculative_tokens, self.speculative_seconds


def speed_report(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return tokens per second of both decoders, the speed-up with its 95% interval, and the sums.

    Fewer than two batches show no variation: the interval is then None.
    """
    rows = np.array([timing.sums() for timing in timings], dtype=np.float64)
    plain_tokens, plain_seconds, speculative_tokens, speculative_seconds = rows.sum(0).tolist()
    return {
        "plain_tokens_per_second": plain_tokens / plain_seconds,
        "speculative_tokens_per_second": speculative_tokens / speculative_seconds,
        "speedup": float(speedups(rows.sum(0, keepdims=True))[0]),
        "speedup_interval": list(central_95(speedups(resampled_sums(rows)))) if len(rows) > 1 else None,
        "plain_tokens": int(plain_tokens),
        "plain_seconds": plain_seconds,
        "speculative_tokens": int(speculative_tokens),
        "speculative_seconds": speculative_seconds,
    }


def speedups(sums: np.ndarray) -> np.ndarray:
    """Return the speed-up for each row of sums [R, 4], see `Timing.sums`."""
    plain_tokens, plain_seconds, speculative_tokens, speculative_seconds = sums.T
    return (speculative_tokens / speculative_seconds) / (plain_tokens / plain_seconds)
