"""Weights of the positions of a block: early slots count more than late ones.

Policy: a draft is used only if all slots before it are right, so early slots matter more. `decay` is
fixed, `dpace` follows the drafter's own probabilities. Weights carry no gradient.

Shape letters: A blocks, K block size, P supervised slots.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash_core.config import ObjectiveConfig


def slot_weights(
    objective: ObjectiveConfig, supervised_AK: Tensor, slot_P: Tensor, log_prob_P: Tensor
) -> Tensor:
    """Return the weight of each supervised slot, float [P].

    Args:
        objective: `weighting` and its settings.
        supervised_AK: of `supervised_slots`.
        slot_P: flat index a * K + k of each supervised slot.
        log_prob_P: the drafter's log-probability of its label.
    """
    num_blocks, block_size = supervised_AK.shape
    if objective.weighting == "decay":
        return decay_weights(block_size, objective.gamma).to(log_prob_P.device)[slot_P % block_size]
    log_prob_AK = log_prob_P.new_zeros(num_blocks * block_size)
    log_prob_AK[slot_P] = log_prob_P
    log_prob_AK = log_prob_AK.view(num_blocks, block_size)
    return dpace_weights(log_prob_AK, supervised_AK, objective.dpace_alpha).flatten()[slot_P]


def decay_gamma(block_size: int) -> float:
    """Return the default decay: 4, 5, 7 for block sizes 8, 10, 16 (arXiv 2602.06036), linear between."""
    if block_size <= 10:
        return block_size / 2
    return float(np.interp(block_size, [10, 16], [5, 7])) if block_size <= 16 else block_size * 7 / 16


def decay_weights(block_size: int, gamma: float | None) -> Tensor:
    """Return w_k = exp(-(k - 1) / gamma), float32 [K], w_0 = 0 (arXiv 2602.06036, section 4)."""
    slot_K = torch.arange(block_size, dtype=torch.float32)
    weight_K = torch.exp(-(slot_K - 1) / (gamma or decay_gamma(block_size)))
    weight_K[0] = 0
    return weight_K


def dpace_weights(log_prob_AK: Tensor, supervised_AK: Tensor, alpha: float) -> Tensor:
    """Return D-PACE weights [A, K] (arXiv 2605.18810): w_j = sum_{m >= j} prod_{i <= m} q_i, detached.

    q = (1 - alpha) p + alpha with p the drafter's probability of the label; i, j, m run over the block's
    supervised slots, counted from slot 1. The product is a smoothed chance that the block is accepted up to
    m, so w_j is what slot j contributes to the expected acceptance length. Unsupervised slots get 0.

    With alpha 0 and p = 1/2, 1/2, 1/2 at three supervised slots: products 1/2, 1/4, 1/8; weights 7/8, 3/8,
    1/8.
    """
    q_AK = (1 - alpha) * log_prob_AK.detach().exp() + alpha
    product_AK = q_AK.masked_fill(~supervised_AK, 1.0).cumprod(dim=1).masked_fill(~supervised_AK, 0.0)
    weight_AK = product_AK.flip(1).cumsum(dim=1).flip(1)
    return weight_AK.masked_fill(~supervised_AK, 0.0)
