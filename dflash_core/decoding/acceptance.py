"""Acceptance statistics of speculative decoding, and the comparison of its output with plain decoding.

A step is one verification by the target; it emits the accepted drafts and one token of the target after them
(the bonus). Acceptance length = emitted tokens / steps over all prompts, never a mean of means; it lies
between 1 and the block size. The token that the prefill yields belongs to no step. Tokens after an end token
or beyond the limit are neither emitted nor counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_core.run_statistics import Interval

# Two logits that are closer than this many bfloat16 steps may swap under rounding.
NEAR_TIE_STEPS = 2.0
BOOTSTRAP_RESAMPLES = 2000


@dataclass
class Generation:
    """One prompt's answer. Lists with an entry per step are empty for plain decoding."""

    # New tokens, the end token included.
    token_ids: list[int] = field(default_factory=list)
    # Per step: tokens emitted, the bonus included; drafts accepted; positions that could have been accepted.
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    # "end" at an end token, "length" at the limit, empty before.
    finished: str = ""

    def take(
        self, drafts: Sequence[int], bonus: int, *, num_drafted: int, limit: int, eos_ids: Sequence[int]
    ) -> None:
        """Record a step: `drafts` are accepted, `bonus` is the target's own token after them.

        The answer ends at the first end token, also inside the block, and at `limit` tokens.
        """
        room = limit - len(self.token_ids)
        tokens = [*drafts, bonus][:room]
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos_ids), None)
        tokens = tokens[:end]
        accepted = min(len(drafts), len(tokens))
        self.token_ids += tokens
        self.emitted.append(len(tokens))
        self.accepted.append(accepted)
        # No draft after an accepted end token, or beyond the limit, could have been accepted.
        ends_in_drafts = end is not None and end <= len(drafts)
        self.drafted.append(min(num_drafted, accepted if ends_in_drafts else room - 1))
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
class Divergence:
    """The first token at which the speculative output of a prompt differs from the plain one."""

    prompt: int
    # Index of the new token, from 0.
    position: int
    # Gap of the plain decoder's two best logits there, in bfloat16 steps.
    margin_steps: float

    @property
    def near_tie(self) -> bool:
        """True where rounding alone may have swapped the two best tokens."""
        return self.margin_steps <= NEAR_TIE_STEPS

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and `near_tie` as JSON types."""
        return vars(self) | {"near_tie": self.near_tie}


def find_divergences(
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    margin_at: Callable[[int, int], float] = lambda prompt, position: float("inf"),
) -> list[Divergence]:
    """Return the first difference of each prompt's greedy outputs; empty when every token is equal.

    Args:
        margin_at: from a prompt's index and a new token's to the gap of the two best logits there, in
            bfloat16 steps; called for differences alone.
    """
    divergences = []
    for prompt, (a, b) in enumerate(zip(plain, speculative, strict=True)):
        if a.token_ids != b.token_ids:
            pairs = zip(a.token_ids, b.token_ids)
            shorter = min(len(a.token_ids), len(b.token_ids))
            position = next((i for i, (x, y) in enumerate(pairs) if x != y), shorter)
            # One output may end where the other goes on; no rounding does that.
            is_token = position < shorter
            margin = margin_at(prompt, position) if is_token else float("inf")
            divergences.append(Divergence(prompt, position, margin))
    return divergences


def bfloat16_steps(best: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return best - second in units of bfloat16's spacing at `best`, which is 2 ** (exponent - 7)."""
    best, second = np.asarray(best, dtype=np.float64), np.asarray(second, dtype=np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(best), 1e-30)))
    return (best - second) / np.exp2(exponent - 7)


def acceptance_length(generations: Sequence[Generation]) -> float:
    """Return emitted tokens / verification steps over all prompts; 1.0 when there was no step."""
    steps = sum(len(g.emitted) for g in generations)
    return sum(sum(g.emitted) for g in generations) / steps if steps else 1.0


def acceptance_interval(generations: Sequence[Generation], block_size: int, *, seed: int = 0) -> Interval:
    """Return `acceptance_length` with its 95% interval: percentile bootstrap of the ratio over prompts.

    Steps of one prompt resemble each other, so prompts are resampled, not steps. Fewer than two prompts do
    not show how much prompts differ: the interval is then the whole range, [1, block_size]. The same input
    gives the same interval.
    """
    mean = acceptance_length(generations)
    pairs = np.array([(sum(g.emitted), len(g.emitted)) for g in generations if g.emitted], dtype=np.float64)
    if len(pairs) < 2:
        return Interval(mean, 1.0, float(block_size))
    emitted, steps = resampled_sums(pairs, seed=seed).T
    return Interval(mean, *central_95(emitted / steps))


def resampled_sums(rows: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the column sums of `BOOTSTRAP_RESAMPLES` draws, with replacement, of the rows [P, F]: [R, F].

    Draws depend on P and the seed alone, so that figures of the same P prompts are resampled in pairs.
    """
    shares = np.full(len(rows), 1 / len(rows))
    return np.random.default_rng(seed).multinomial(len(rows), shares, size=BOOTSTRAP_RESAMPLES) @ rows


def central_95(values: np.ndarray) -> tuple[float, float]:
    """Return the 2.5% and the 97.5% quantile."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def acceptance_by_position(generations: Sequence[Generation], block_size: int) -> tuple[list[int], list[int]]:
    """Count the accepted drafts, and those that could have been accepted, at each position 1..block_size - 1.

    A draft counts as accepted when all drafts before it were too; so the rates fall with the position, and 1
    + their sum is about the acceptance length.
    """
    accepted = np.array([a for g in generations for a in g.accepted], dtype=np.int64)
    drafted = np.array([d for g in generations for d in g.drafted], dtype=np.int64)
    positions = range(1, block_size)
    return [int((accepted >= k).sum()) for k in positions], [int((drafted >= k).sum()) for k in positions]


def acceptance_report(generations: Sequence[Generation], block_size: int) -> dict[str, Any]:
    """Return the figures of one group of prompts, as JSON types."""
    accepted, drafted = acceptance_by_position(generations, block_size)
    length = acceptance_interval(generations, block_size)
    return {
        "acceptance_length": length.mean,
        "acceptance_interval": [length.low, length.high],
        "acceptance_by_position": [a / d if d else 0.0 for a, d in zip(accepted, drafted)],
        "accepted_by_position": accepted,
        "drafted_by_position": drafted,
        "prompts": len(generations),
        "steps": sum(len(g.emitted) for g in generations),
        "tokens": sum(len(g.token_ids) for g in generations),
        "ended": sum(g.finished == "end" for g in generations),
    }
