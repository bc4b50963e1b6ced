"""Choosing tokens and accepting drafts: the rules that keep the output distributed as the target's own.

Greedy: the longest run of drafts that equal the target's own argmax is accepted, then the target's next
token. Sampling: the lossless rule of Leviathan et al. (arXiv 2211.17192). Probabilities are float64, because
the rule compares their ratios and differences; that costs one [B, K, V] tensor of 8 bytes per entry for the
target and one for the drafter.

Shape letters: B rows, K block size, k = K - 1 drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of a decoder: how tokens are chosen and when an answer ends."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    seed: int = 0
    batch_size: int = 1  # prompts decoded at the same time


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature) in float64."""
    return torch.softmax(logits.double() / temperature, dim=-1)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw an index from each row of unnormalised weights [..., V], using one number of [0, 1) per row.

    Takes the first index whose running sum exceeds that share of the total; an index of weight zero is never
    drawn.
    """
    running = weights.cumsum(-1)
    drawn = torch.searchsorted(running, (uniforms * running[..., -1])[..., None], right=True)[..., 0]
    return drawn.clamp(max=weights.shape[-1] - 1)


def accept_greedy(drafts_Bk: Tensor, own_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Count the leading drafts that are the target's own tokens; also returns its token after them, [B] each.

    Drafts 5 7 9 against the target's 5 7 4 8: two accepted, then 4.
    """
    accepted_B = (drafts_Bk == own_BK[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return accepted_B, own_BK.gather(1, accepted_B[:, None])[:, 0]


def accept_sampled(
    drafts_Bk: Tensor, draft_probs_BkV: Tensor, target_probs_BKV: Tensor, uniforms_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the lossless rule; returns the number of accepted drafts and the token after them, [B] each.

    The rule is algorithm 1 of arXiv 2211.17192: draft k is kept while u_k < p_k(d_k) / q_k(d_k). The next
    token is drawn from max(p - q, 0), normalised, at the first rejection, and from p after the last draft; so
    every emitted token is distributed as p.
    """
    index = drafts_Bk[..., None]
    ratio_Bk = (target_probs_BKV[:, :-1].gather(2, index) / draft_probs_BkV.gather(2, index))[..., 0]
    accepted_B = (uniforms_BK[:, :-1] < ratio_Bk).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafts_Bk), device=drafts_Bk.device)
    target_BV = target_probs_BKV[rows, accepted_B]
    rejected_B = accepted_B < drafts_Bk.shape[1]
    draft_BV = draft_probs_BkV[rows, accepted_B.clamp(max=drafts_Bk.shape[1] - 1)]
    residual_BV = (target_BV - draft_BV).clamp(min=0)
    # Where p == q to the last bit nothing is left to draw from; only rounding can have rejected there.
    use_B = rejected_B & (residual_BV.sum(-1) > 0)
    return accepted_B, sample(torch.where(use_B[:, None], residual_BV, target_BV), uniforms_BK[:, -1])
