"""Slots that have a label: where the drafter is trained, and where supervision of a block ends.

Slot k of the block anchored at row a stands for row a + k, no shift. Its label is the data's token in that
row or, for responses that the target did not write, what the target itself would put there after the data's
tokens up to a + k - 1 (`target_labels`).

Policy: supervision follows decoding. A block is supervised from slot 1 up to the first token that is not
supervised, the sample's end, or, on request, the first disagreement between target and data.
"""

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
    """Return the slots that have a label, bool [A, K].

    Slot 0 is the known anchor (arXiv 2602.06036, section 4). From slot 1 on, supervision lasts until the
    first token that is not supervised or the sample's end, and does not start again: no drafting across a
    user turn, none into the next sample of a pack. Where to stop is our choice: decoding never continues
    behind an end of turn. Mask 0 1 1 1 0 1 | 1 1 (two samples), block size 4: anchor 1 -> slots 1, 2;
    anchor 2 -> slot 1.

    With `agrees_T` (true where a row's token is what the target would have put there) supervision also ends
    after the first slot that does not agree. Up to there the data's tokens are the target's own greedy
    continuation, so each label is what verification compares with; a later label would condition on tokens
    that the target would not have generated.
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
