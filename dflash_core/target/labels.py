"""Labels that are the target's own tokens instead of the data's.

Policy: capture computes them, next to the states, because the full [T, V] logits are never stored: only rows
that can be labels go through lm_head, tile by tile.

Price: one pass over lm_head per supervised token, and all layers of the target, where capture would otherwise
stop after the last captured one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.kernels.linear_cross_entropy import linear_argmax


def target_labels(
    last_hidden_TD: Tensor,
    head_VD: Tensor,
    loss_mask_T: Tensor,
    cu_seqlens: Tensor,
    *,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Return the target's own token for each row that can be a label, int64 [T]; -1 elsewhere.

    Row p gets argmax(head @ last_hidden[p - 1] + bias): what the target puts after the data's tokens up to
    p - 1. A scale or a soft cap of its logits does not change that.
    Rows that can be labels are supervised and follow a supervised row of the same sample (an anchor is
    supervised itself).
    """
    mask_T = loss_mask_T.bool()
    can_T = mask_T.clone()
    can_T[1:] &= mask_T[:-1]
    can_T[cu_seqlens[:-1].long().clamp(max=max(0, len(mask_T) - 1))] = False
    row_P = can_T.nonzero()[:, 0]
    labels_T = torch.full(can_T.shape, -1, dtype=torch.int64, device=can_T.device)
    labels_T[row_P] = linear_argmax(last_hidden_TD[row_P - 1].to(head_VD.dtype), head_VD, bias_V)
    return labels_T
