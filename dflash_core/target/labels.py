"""Labels that are the target's own tokens instead of the data's.

Policy: capture computes them, next to the states, because the full [T, V] logits are never stored: only rows
that can be labels go through lm_head, tile by tile.

Price: one pass over lm_head per supervised token, and all layers of the target, where capture would otherwise
stop after the last captured one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dflash_core.kernels.linear_cross_entropy import linear_argmax


def label_rows(loss_mask: NDArray[np.uint8], cu_seqlens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the rows that can be labels: supervised, and behind a supervised row of their sample.

    The row before is the anchor, or holds the slot before. Mask 0 1 1 1 | 1 1 (two samples): rows 2, 3 and 5.
    Arrays of the host, so that it waits for no device.
    """
    can_be = loss_mask.astype(bool)
    can_be[1:] &= loss_mask[:-1].astype(bool)
    can_be[cu_seqlens[:-1][cu_seqlens[:-1] < len(can_be)]] = False
    return np.flatnonzero(can_be)


def target_labels(
    last_hidden_TD: Tensor, head_VD: Tensor, row_P: Tensor, *, bias_V: Tensor | None = None
) -> Tensor:
    """Return the target's own token for each of the rows, int64 [T]; -1 elsewhere.

    Row p gets argmax(head @ last_hidden[p - 1] + bias): what the target puts after the data's tokens up to
    p - 1. A scale or a soft cap of its logits does not change that.

    Args:
        last_hidden_TD: the target's last hidden states.
        head_VD: weight of its lm_head, in the dtype of the products.
        row_P: int64, see `label_rows`.
        bias_V: of its lm_head.
    """
    labels_T = row_P.new_full((len(last_hidden_TD),), -1)
    labels_T[row_P] = linear_argmax(last_hidden_TD[row_P - 1].to(head_VD.dtype), head_VD, bias_V)
    return labels_T
