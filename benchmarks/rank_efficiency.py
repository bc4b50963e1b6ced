"""How much of their time the ranks of a step work: microbatches per rank, slots, kinds of data.

    python -m benchmarks.rank_efficiency         # half a minute

A step waits for its slowest rank. Claim: three microbatches per rank and step keep 8 ranks at work for 98.5%
of their time, by the cost model of an 8B target and five drafter layers; one does not, and one with exactly
so many tokens (not half a budget less) loses more where packs are a token short, for a step then needs one
microbatch more than there are ranks. Long samples that fill packs alone cost less than packs of short ones,
with their many anchors, and leave a spread that no assignment evens out. Samples have 512 anchors, blocks 16
slots, 60% of the tokens are supervised. Prints a table for each kind of data, then one line of JSON.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.batching import synthetic_lengths
from benchmarks.support.command import parser, print_json
from dflash_core.anchors import draft_slots
from dflash_core.batching.metrics import rank_efficiency
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig

RANKS = (8, 16, 64, 512)
# slots per microbatch, microbatches per rank, budgets by which a step is short of them
SETTINGS = ((49_152, 1, 0.0), (49_152, 1, 0.5), (24_576, 2, 0.5), (16_384, 3, 0.5), (8_192, 6, 0.5))


def data(num_samples: int) -> dict[str, np.ndarray]:
    """Return lengths, int32[n], of each kind of data."""
    rng = np.random.default_rng(0)
    half = num_samples // 2
    mixed = np.concatenate([np.full(half, 8192), rng.integers(64, 2001, half)])
    return {
        "synthetic chats": synthetic_lengths(num_samples),
        "half 8,192, half at most 2,000": rng.permutation(mixed).astype(np.int32),
    }


def efficiency(lengths: np.ndarray, *, budget: int, per_rank: int, short: float, ranks: int) -> float:
    """Return the rank efficiency of one epoch of packed plans."""
    config = BatchingConfig(token_budget=budget, tokens_per_step=int(budget * (per_rank * ranks - short)))
    slots = draft_slots((lengths * 0.6).astype(np.int32), num_anchors=512, block_size=16)
    return rank_efficiency(build_plan(lengths, config, seed=0, epoch=0, draft_slots=slots), ranks)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--samples", type=int, default=300_000)
    num_samples = args.parse_args().samples
    figures: dict[str, Any] = {}
    for name, lengths in data(num_samples).items():
        print(f"\n{name}, {len(lengths):,} samples\n")
        print("| slots per microbatch, microbatches per step |" + "".join(f" {r} ranks |" for r in RANKS))
        print("| --- |" + " --- |" * len(RANKS))
        for budget, per_rank, short in SETTINGS:
            given = {"budget": budget, "per_rank": per_rank, "short": short}
            row = [efficiency(lengths, ranks=ranks, **given) for ranks in RANKS]
            setting = f"{budget:,}, {per_rank} per rank{f' - {short}' if short else ''}"
            print(f"| {setting} |" + "".join(f" {value:.3f} |" for value in row), flush=True)
            figures[f"{name}: {setting}"] = row
    print()
    print_json(figures)


if __name__ == "__main__":
    main()
