"""Vocabulary loss of draft positions under a frozen head, without ever holding [positions, vocabulary].

Three implementations of one signature, tested against each other:

- `linear_cross_entropy_reference`: full logits, a few lines, any dtype (float64 as the oracle);
- `linear_cross_entropy` on CPU tensors: chunks of positions, gradient found while the logits are live;
- `linear_cross_entropy` on CUDA tensors: `linear_cross_entropy_triton`.

Shape letters: P positions, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VocabularyLoss(NamedTuple):
    """Per position; float32, or float64 for float64 inputs."""

    loss_P: (
        Tensor  # cross-entropy to the label, or forward KL to the soft target; differentiable in hidden alone
    )
    log_prob_P: Tensor  # the drafter's log-probability of the label; no gradient
    correct_P: Tensor  # bool: the largest logit (lowest id among equals) is the label's


def linear_cross_entropy(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, *, soft_target_PD: Tensor | None = None
) -> VocabularyLoss:
    """Loss, label log-probability and top-1 hit of logits = hidden @ head.T, row by row.

    The caller leaves out the positions that it does not supervise and applies its weights to `loss_P` afterwards:
    row p's gradient to the hidden state is `grad_loss[p] * (softmax(logits[p]) - q[p]) @ head`, where q is one-hot of
    the label or, with a soft target, softmax(soft_target[p] @ head.T). A row with zero weight gets an exact zero.

    Args:
        hidden_PD: final hidden states, float64, float32 or bfloat16.
        head_VD: the target's lm_head, frozen: it gets no gradient. Dtype of `hidden_PD`. Any V.
        labels_P: int64, 0 <= label < V.
        soft_target_PD: None, or what the target's lm_head reads for the same predictions (its last hidden state after
            the final norm): the loss is then KL(softmax(soft_target @ head.T) || softmax(hidden @ head.T)).
            No gradient flows to it. `log_prob_P` and `correct_P` still refer to `labels_P`.

    Returns:
        VocabularyLoss. Products accumulate in float32 (float64 for float64). P = 0 gives empty tensors.
    """
    if hidden_PD.is_cuda:
        from dflash_core.kernels import linear_cross_entropy_triton

        return linear_cross_entropy_triton.linear_cross_entropy(
            hidden_PD, head_VD, labels_P, soft_target_PD=soft_target_PD
        )
    return linear_cross_entropy_reference(hidden_PD, head_VD, labels_P, soft_target_PD=soft_target_PD)


def linear_argmax(hidden_PD: Tensor, head_VD: Tensor) -> Tensor:
    """Id of the largest logit of each row, int64 [P], lowest id among equals: the target's own next token."""
    chunks = [
        _logits(hidden, head_VD).argmax(dim=-1)
        for hidden in hidden_PD.detach().split(max(1, 2**24 // len(head_VD)))
    ]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64, device=hidden_PD.device)


def linear_cross_entropy_reference(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, *, soft_target_PD: Tensor | None = None
) -> VocabularyLoss:
    """`linear_cross_entropy` with full logits, for reading and for tests."""
    logits_PV = _logits(hidden_PD, head_VD.detach())
    log_prob_PV = logits_PV.log_softmax(dim=-1)
    log_prob_P = log_prob_PV.gather(1, labels_P[:, None])[:, 0]
    if soft_target_PD is None:
        loss_P = -log_prob_P
    else:
        target_PV = _logits(soft_target_PD.detach(), head_VD.detach()).log_softmax(dim=-1)
        loss_P = (target_PV.exp() * (target_PV - log_prob_PV)).sum(dim=-1)
    return VocabularyLoss(loss_P, log_prob_P.detach(), logits_PV.detach().argmax(dim=-1) == labels_P)


def _logits(hidden: Tensor, head_VD: Tensor) -> Tensor:
    accumulate = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(accumulate) @ head_VD.to(accumulate).T
