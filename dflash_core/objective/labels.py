"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor


def supervised_slots(
    loss_mask_T: Tensor,
    anchor_A: Tensor,
    sample_end_A: Tensor,
    *,
    block_size: int,
    agrees_T: Tensor | None = None,
) -> Tensor:
    """Which slots have a label, bool [A, K].

    Slot 0 is the known anchor (arXiv 2602.06036, section 4). From slot 1 on, supervision lasts until the first
    token that is not supervised or the sample's end, and does not start again: no drafting across a user turn,
    none into the next sample of a pack. Where to stop is our choice: decoding never goes on behind an end of
    turn. Mask 0 1 1 1 0 1 | 1 1 (two samples), block size 4: anchor 1 -> slots 1, 2;
    anchor 2 -> slot 1.

    With `agrees_T` (whether a row's token is what the target would have put there) supervision also ends
    after the first slot that does not agree. Up to there the data's tokens are the target's own greedy
    continuation, so each label is what verification compares with; a later label would answer tokens that
    never come up in decoding.
    """
    row_AK = anchor_A.long()[:, None] + torch.arange(block_size, device=anchor_A.device)
    inside_AK = row_AK < sample_end_A.long()[:, None]
    row_AK = row_AK.clamp(max=max(0, len(loss_mask_T) - 1))
    mask_AK = loss_mask_T.bool()[row_AK] & inside_AK
    if agrees_T is not None:
        mask_AK[:, 2:] &= agrees_T[row_AK[:, 1:-1]]
    mask_AK[:, 0] = True
    supervised_AK = mask_AK.long().cumprod(dim=1).bool()
    supervised_AK[:, 0] = False
    return supervised_AK
