"""The attention rule of DFlash training and decoding (arXiv 2602.06036, section 3), in one place.

Slot k of a block (anchor at packed row a of a sample that starts at row s) sees

- context rows r with s <= r < a: its own sample, strictly before the anchor. The target's hidden state of the
  anchor token itself is unknown when the drafter runs, so it is never visible;
- of these, with a sliding window, only rows with (a + k) - r < window;
- all K slots of its own block, in both directions. The slots past a sample's end exist too, as in decoding;

and nothing else: no other block, no other sample.

Worked example, samples of 4 and 5 tokens packed in rows 0..8, block size 2, anchors at rows 2 and 6:

    slot          context rows seen     with sliding_window 3
    2.0           0 1                   0 1
    2.1           0 1                   1
    6.0           4 5                   4 5
    6.1           4 5                   5

Shape letters: A blocks, K slots per block, T packed context rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_bounds(
    context_start_A: Tensor, anchor_A: Tensor, *, block_size: int, sliding_window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the half-open range of context rows that each slot sees.

    Args:
        context_start_A: first packed row of each block's sample.
        anchor_A: packed row of each block's anchor.
        block_size: slots per block.
        sliding_window: None, or how far back a slot sees, itself included.

    Returns:
        `first_AK` and `end_AK`, int64: slot (a, k) sees rows first <= r < end; empty where first >= end.
    """
    start_AK = context_start_A.long()[:, None].expand(-1, block_size)
    end_AK = anchor_A.long()[:, None].expand(-1, block_size)
    if sliding_window is None:
        return start_AK, end_AK
    slot_K = torch.arange(block_size, device=anchor_A.device)
    return torch.maximum(start_AK, end_AK + slot_K + 1 - sliding_window), end_AK


def context_mask(
    context_start_A: Tensor,
    anchor_A: Tensor,
    *,
    num_rows: int,
    block_size: int,
    sliding_window: int | None = None,
) -> Tensor:
    """Return the rule as a dense bool [A, K, T], True where visible. For references, never at scale."""
    first_AK, end_AK = context_bounds(
        context_start_A, anchor_A, block_size=block_size, sliding_window=sliding_window
    )
    row_T = torch.arange(num_rows, device=anchor_A.device)
    return (row_T >= first_AK[..., None]) & (row_T < end_AK[..., None])
