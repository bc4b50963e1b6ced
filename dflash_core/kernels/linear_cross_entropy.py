"""Vocabulary loss of draft positions under a frozen head, without ever holding [positions, vocabulary].

Three implementations of one signature, tested against each other:

- `linear_cross_entropy_reference`: full logits, a few lines, any dtype (float64 as the oracle);
- `linear_cross_entropy` on CPU tensors: one pass over tiles of the logits with a running maximum (as in
  online softmax, Milakov and Gimelshein 2018). The gradient of a row's loss to its hidden state does not
  depend on the row's weight, so it is summed while the tile is live and backward is a product with the
  weights: two matrix products per logit instead of the three of a recomputing backward, and one tile (8 MB in
  float32) instead of the logits;
- `linear_cross_entropy` on CUDA tensors: `linear_cross_entropy_triton`.

Shape letters: P positions, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# One tile of logits: 1024 x 2048 float32 is 8 MB and stays in cache; whole rows cost 5 to 10% more time.
TILE_POSITIONS = 1024
TILE_VOCABULARY = 2048


class VocabularyLoss(NamedTuple):
    """Loss and accuracy per position; float32, or float64 for float64 inputs."""

    # cross-entropy to the label, or forward KL to the soft target; differentiable in hidden
    loss_P: Tensor
    # the drafter's log-probability of the label; no gradient
    log_prob_P: Tensor
    # bool: the largest logit (lowest id among equals) is the label's
    correct_P: Tensor


def linear_cross_entropy(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, *, soft_target_PD: Tensor | None = None
) -> VocabularyLoss:
    """Return loss, label log-probability and top-1 hit of logits = hidden @ head.T, row by row.

    The caller leaves out the positions that it does not supervise and applies its weights to `loss_P`
    afterwards: row p's gradient to the hidden state is `grad_loss[p] * (softmax(logits[p]) - q[p]) @ head`,
    where q is one-hot of the label or, with a soft target, softmax(soft_target[p] @ head.T). Zero weight
    gives an exact zero.

    Args:
        hidden_PD: final hidden states, float64, float32 or bfloat16.
        head_VD: the target's lm_head, frozen: it gets no gradient. Dtype of `hidden_PD`. Any V.
        labels_P: int64, 0 <= label < V.
        soft_target_PD: None, or the input of the target's lm_head for the same predictions (its last hidden
            state after the final norm): the loss is then KL(softmax(soft_target @ head.T) || softmax(hidden @
            head.T)). No gradient flows to it. `log_prob_P` and `correct_P` still refer to `labels_P`.

    Returns:
        VocabularyLoss. Products and sums accumulate in float32 (float64 for float64). Empty for P = 0.
    """
    head_VD = head_VD.detach()
    if hidden_PD.is_cuda:
        from dflash_core.kernels import linear_cross_entropy_triton

        compute = linear_cross_entropy_triton.linear_cross_entropy
        return VocabularyLoss(*compute(hidden_PD, head_VD, labels_P, soft_target_PD=soft_target_PD))
    return VocabularyLoss(*_TiledLoss.apply(hidden_PD, head_VD, labels_P, soft_target_PD))


class _TiledLoss(torch.autograd.Function):
    """The CPU path. Saves one [P, D] gradient of the unweighted losses."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, soft_target_PD: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        accumulate = torch.promote_types(hidden_PD.dtype, torch.float32)
        num_positions = len(hidden_PD)
        loss_P = hidden_PD.new_empty(num_positions, dtype=accumulate)
        log_prob_P = torch.empty_like(loss_P)
        correct_P = torch.empty(num_positions, dtype=torch.bool)
        grad_PD = torch.empty(hidden_PD.shape, dtype=accumulate) if ctx.needs_input_grad[0] else None
        for begin in range(0, num_positions, TILE_POSITIONS):
            rows = slice(begin, begin + TILE_POSITIONS)
            hidden, labels = hidden_PD[rows], labels_P[rows]
            label_head = head_VD[labels]
            label_logit = (hidden.to(accumulate) * label_head.to(accumulate)).sum(-1)
            # rounded as in the scan, so that p <= 1
            label_logit = label_logit.to(hidden.dtype).to(accumulate)
            mean_head = None if grad_PD is None else grad_PD[rows]
            log_sum, best = _scan_vocabulary(hidden, head_VD, mean_head)
            log_prob_P[rows] = label_logit - log_sum
            correct_P[rows] = best == labels
            if soft_target_PD is None:
                loss_P[rows] = -log_prob_P[rows]
                expected_head = label_head
            else:
                expected_head = torch.empty(hidden.shape, dtype=accumulate)
                target = soft_target_PD[rows]
                target_log_sum, _ = _scan_vocabulary(target, head_VD, expected_head)
                # sum_v p_v (target logit_v - logit_v) = (target - hidden) . sum_v p_v head_v
                difference = ((target.to(accumulate) - hidden.to(accumulate)) * expected_head).sum(-1)
                loss_P[rows] = difference - target_log_sum + log_sum
            if mean_head is not None:
                mean_head.sub_(expected_head)
        ctx.save_for_backward(grad_PD)
        ctx.dtype = hidden_PD.dtype
        ctx.mark_non_differentiable(log_prob_P, correct_P)
        return loss_P, log_prob_P, correct_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_PD,) = ctx.saved_tensors
        return (grad_PD * grads[0][:, None]).to(ctx.dtype), None, None, None


def _scan_vocabulary(hidden: Tensor, head_VD: Tensor, mean_head: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scan the vocabulary once for a chunk of rows.

    Args:
        hidden: [R, D].
        head_VD: [V, D].
        mean_head: [R, D] to overwrite with softmax(hidden @ head.T) @ head, or None.

    Returns:
        The log of the summed exponentials [R], and the id of the largest logit [R], lowest among equals.
    """
    accumulate = torch.promote_types(hidden.dtype, torch.float32)
    narrow, num_rows = hidden.dtype != accumulate, len(hidden)
    largest = torch.full((num_rows,), -torch.inf, dtype=accumulate)
    best = torch.zeros(num_rows, dtype=torch.int64)
    total = torch.zeros(num_rows, dtype=accumulate)
    buffer = torch.empty(num_rows * min(TILE_VOCABULARY, len(head_VD)), dtype=accumulate)
    for begin in range(0, len(head_VD), TILE_VOCABULARY):
        head = head_VD[begin : begin + TILE_VOCABULARY]
        logits = buffer[: num_rows * len(head)].view(num_rows, len(head))
        if narrow:
            # bfloat16 products round their result, as the target's own logits do
            logits.copy_(hidden @ head.T)
        else:
            torch.mm(hidden, head.T, out=logits)
        tile_largest, tile_best = logits.max(dim=-1)
        best = torch.where(tile_largest > largest, tile_best + begin, best)
        new_largest = torch.maximum(largest, tile_largest)
        rescale = (largest - new_largest).exp_()
        largest = new_largest
        exponentials = logits.sub_(largest[:, None]).exp_()
        total.mul_(rescale).add_(exponentials.sum(dim=-1))
        if mean_head is None:
            continue
        if begin == 0:
            mean_head.zero_()
        if narrow:
            mean_head.mul_(rescale[:, None]).add_(exponentials.to(hidden.dtype) @ head)
        else:
            mean_head.mul_(rescale[:, None]).addmm_(exponentials, head)
    if mean_head is not None:
        mean_head.div_(total[:, None])
    return total.log_().add_(largest), best


def linear_argmax(hidden_PD: Tensor, head_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return the id of each row's largest logit, with a bias where given, int64 [P], lowest id among equals.

    For the target's hidden states that is the target's own next token.

    Tiles are [vocabulary, positions]: a CPU's matrix product is up to twice as fast in this orientation when
    there are few positions (56 rows of SmolLM2's head: 52 ms instead of 92 ms).
    """
    tile = TILE_VOCABULARY if hidden_PD.device.type == "cpu" else 16 * TILE_VOCABULARY
    best_P = torch.zeros(len(hidden_PD), dtype=torch.int64, device=hidden_PD.device)
    for begin in range(0, len(hidden_PD), TILE_POSITIONS):
        hidden_DR = hidden_PD[begin : begin + TILE_POSITIONS].detach().T
        largest = hidden_DR.new_full((hidden_DR.shape[1],), -torch.inf)
        best = best_P[begin : begin + TILE_POSITIONS]
        for first in range(0, len(head_VD), tile):
            logits_VR = head_VD[first : first + tile] @ hidden_DR
            if bias_V is not None:
                logits_VR += bias_V[first : first + tile, None]
            tile_largest, tile_best = logits_VR.max(dim=0)
            best.copy_(torch.where(tile_largest > largest, tile_best + first, best))
            largest = torch.maximum(largest, tile_largest)
    return best_P


def linear_cross_entropy_reference(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, *, soft_target_PD: Tensor | None = None
) -> VocabularyLoss:
    """Compute `linear_cross_entropy` with full logits, for reading and for tests."""
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
