"""What speculative decoding achieved: counts by step and position, an interval, and the comparison with plain
decoding.

Definitions. A step is one verification by the target; it emits the accepted drafts and one token of the
target's own (the bonus). Acceptance length = emitted tokens / steps over all prompts, never a mean of means;
the token that the prefill yields belongs to no step. Tokens after an end token or beyond the limit are not
emitted and not counted. The least value is 1, the greatest the block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NEAR_TIE_STEPS = 2.0  # two logits closer than this many bfloat16 steps may swap under rounding
BOOTSTRAP_RESAMPLES = 2000


@dataclass
class Generation:
    """One prompt's answer. Lists by step are empty for plain decoding."""

    token_ids: list[int] = field(default_factory=list)  # new tokens, the end token included
    emitted: list[int] = field(default_factory=list)  # by step, the bonus included
    accepted: list[int] = field(default_factory=list)  # by step, drafts kept
    drafted: list[int] = field(default_factory=list)  # by step, positions that could have been kept
    margins: list[float] = field(default_factory=list)  # by token, plain greedy: gap of the two best logits
    finished: str = ""  # "end" at an end token, "length" at the limit

    def take(
        self, drafts: Sequence[int], bonus: int, *, num_drafted: int, limit: int, eos_ids: Sequence[int]
    ) -> None:
        """Record a step: `drafts` are accepted, `bonus` is the target's own token after them.

        Stops at the first end token, inside the block too, and at `limit` tokens.
        """
        room = limit - len(self.token_ids)
        tokens = [*drafts, bonus][:room]
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), None)
        tokens = tokens[:end]
        kept = min(len(drafts), len(tokens))
        self.token_ids += tokens
        self.emitted.append(len(tokens))
        self.accepted.append(kept)
        # after an accepted end token, or beyond the limit, no draft could have been kept
        self.drafted.append(min(num_drafted, kept if end is not None and end <= len(drafts) else room - 1))
        self._close(limit, ended=end is not None)

    def first(self, token: int, *, limit: int, eos_ids: Sequence[int]) -> None:
        """Record a token that belongs to no step: of the prefill, or of plain decoding."""
        self.token_ids.append(token)
        self._close(limit, ended=token in eos_ids)

    def _close(self, limit: int, *, ended: bool) -> None:
        if ended:
            self.finished = "end"
        elif len(self.token_ids) >= limit:
            self.finished = "length"


@dataclass(frozen=True)
class Difference:
    """Where speculative and plain output part for the first time."""

    prompt: int
    position: int  # of the new token, from 0
    margin_steps: float  # the plain decoder's gap between its two best logits there, in bfloat16 steps

    @property
    def near_tie(self) -> bool:
        return self.margin_steps <= NEAR_TIE_STEPS


def compare(plain: Sequence[Generation], speculative: Sequence[Generation]) -> list[Difference]:
    """First differences between greedy outputs of the same prompts; empty when every token is equal."""
    differences = []
    for prompt, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        if a.token_ids != b.token_ids:
            pairs = zip(a.token_ids, b.token_ids)
            shorter = min(len(a.token_ids), len(b.token_ids))
            position = next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)
            margin = a.margins[position] if position < len(a.margins) else float("inf")
            differences.append(Difference(prompt, position, margin))
    return differences


def bfloat16_steps(best: np.ndarray, second: np.ndarray) -> np.ndarray:
    """best - second in units of bfloat16's spacing at `best` (2 ** (exponent - 7))."""
    best, second = np.asarray(best, dtype=np.float64), np.asarray(second, dtype=np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(best), 1e-30)))
    return (best - second) / np.exp2(exponent - 7)


def acceptance_length(generations: Sequence[Generation]) -> float:
    """Emitted tokens / verification steps over all prompts; 1.0 when there was no step."""
    steps = sum(len(g.emitted) for g in generations)
    return sum(sum(g.emitted) for g in generations) / steps if steps else 1.0


def acceptance_interval(
    generations: Sequence[Generation], block_size: int, *, seed: int = 0
) -> tuple[float, float]:
    """95% interval of `acceptance_length`: percentile bootstrap of the ratio over prompts, same at each call.

    Steps of one prompt resemble each other, so prompts are drawn, not steps. Fewer than two prompts say
    nothing about
    others: the interval is then all that is possible, [1, block_size].
    """
    pairs = np.array([(sum(g.emitted), len(g.emitted)) for g in generations if g.emitted], dtype=np.float64)
    if len(pairs) < 2:
        return 1.0, float(block_size)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=BOOTSTRAP_RESAMPLES)
    emitted, steps = (weights @ pairs).T
    low, high = np.quantile(emitted / steps, [0.025, 0.975])
    return float(low), float(high)


def acceptance_by_position(generations: Sequence[Generation], block_size: int) -> tuple[list[int], list[int]]:
    """How often the draft at position k = 1..block_size - 1 was kept, and how often it could have been.

    Kept means the whole block up to k was; so the rates fall with k, and 1 + their sum is about the
    acceptance length.
    """
    accepted = np.array([a for g in generations for a in g.accepted], dtype=np.int64)
    drafted = np.array([d for g in generations for d in g.drafted], dtype=np.int64)
    positions = range(1, block_size)
    return [int((accepted >= k).sum()) for k in positions], [int((drafted >= k).sum()) for k in positions]


def acceptance_report(generations: Sequence[Generation], block_size: int) -> dict[str, Any]:
    """The figures of one group of prompts, as JSON types."""
    accepted, drafted = acceptance_by_position(generations, block_size)
    return {
        "acceptance_length": acceptance_length(generations),
        "acceptance_interval": list(acceptance_interval(generations, block_size)),
        "acceptance_by_position": [a / d if d else 0.0 for a, d in zip(accepted, drafted)],
        "accepted_by_position": accepted,
        "drafted_by_position": drafted,
        "prompts": len(generations),
        "steps": sum(len(g.emitted) for g in generations),
        "tokens": sum(len(g.token_ids) for g in generations),
        "ended": sum(g.finished == "end" for g in generations),
    }
