"""What the drafter is trained on: supervised slots, position weights, and the loss of a microbatch.

Normalisation: everything here is a plain sum. A step's loss is the sum of `loss_sum` over its microbatches
and ranks divided by the sum of `weight_sum`, so the same samples give the same loss and gradient however they
are split. The caller divides the gradients once.

Cost: a microbatch goes through the drafter in chunks of whole blocks, forward and backward a chunk. The
context is projected once, its gradient is summed over chunks and propagated once, so peak memory follows
`max_draft_slots` and not the number of anchors.

Labels: slot k of the block anchored at row a stands for row a + k, no shift. Its label is the data's token in
that row or, for responses that the target did not write, what the target itself would put there after the
data's tokens up to a + k - 1: the argmax of its logits at row a + k - 1.

Shape letters: A blocks, K block size, P supervised slots, T packed tokens, L captured layers, D width, V
vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_core.config import ObjectiveConfig
from dflash_core.drafter.drafter import DFlashDrafter, LayerContext
from dflash_core.kernels.linear_cross_entropy import linear_cross_entropy
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.labels import supervised_slots
from dflash_core.objective.weights import decay_weights, dpace_weights
from dflash_core.target.labels import target_labels


class TargetHeads(NamedTuple):
    """The frozen ends of the target. Their dtype is the compute dtype of the drafter."""

    embed_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised slots and blocks; `+` combines microbatches, steps and ranks."""

    loss_sum: Tensor  # float64 scalar, weight times loss
    weight_sum: Tensor  # float64 scalar
    correct_K: Tensor  # int64, slots whose largest logit is the label, by position in the block; [0] is 0
    count_K: Tensor  # int64, supervised slots by position
    accepted_sum: Tensor  # int64 scalar, leading correct slots summed over blocks
    accepted_square_sum: Tensor  # int64 scalar
    num_blocks: Tensor  # int64 scalar
    num_slots: Tensor  # int64 scalar, draft slots that went through the drafter

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @classmethod
    def zeros(cls, block_size: int, device: torch.device | str = "cpu") -> LossSums:
        """The sums of nothing."""
        scalar = torch.zeros((), dtype=torch.int64, device=device)
        position = torch.zeros(block_size, dtype=torch.int64, device=device)
        return cls(scalar.double(), scalar.double(), position, position, scalar, scalar, scalar, scalar)

    def loss(self) -> float:
        """Weighted mean loss; 0 when nothing is supervised."""
        return float(self.loss_sum / self.weight_sum) if float(self.weight_sum) else 0.0

    def accuracy_K(self) -> list[float]:
        """Share of correct slots by position (0 at position 0 and where nothing is supervised)."""
        return (self.correct_K.double() / self.count_K.clamp(min=1)).tolist()

    def acceptance_length(self) -> tuple[float, float, float]:
        """Simulated acceptance length, greedy, bonus token included, with its 95% interval (low, high).

        1 + leading correct slots, averaged over blocks. The interval takes blocks as independent. Slots that
        are not supervised count as rejected, so it is a lower bound near the ends of answers.
        """
        blocks = int(self.num_blocks)
        if not blocks:
            return 1.0, 1.0, 1.0
        mean = float(self.accepted_sum) / blocks
        variance = max(0.0, float(self.accepted_square_sum) / blocks - mean * mean)
        half = 1.96 * math.sqrt(variance / blocks)
        return 1 + mean, 1 + mean - half, 1 + mean + half


@dataclass(frozen=True)
class _Blocks:
    """What a chunk of blocks needs, on the compute device."""

    anchor_A: Tensor
    context_start_A: Tensor
    supervised_AK: Tensor
    slot_P: Tensor  # flat index a * K + k of each supervised slot, a within the chunk


def microbatch_loss(
    drafter: DFlashDrafter,
    heads: TargetHeads,
    features: Tensor,
    token_ids: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    anchors: Tensor,
    anchor_sample: Tensor,
    *,
    objective: ObjectiveConfig,
    mask_token_id: int,
    max_draft_slots: int,
    labels_T: Tensor | None = None,
    last_hidden: Tensor | None = None,
    backward: bool,
) -> LossSums:
    """Sums of one microbatch; with `backward`, adds the gradient of `loss_sum` to the drafter's `.grad`.

    Args:
        drafter: its `.grad` is accumulated into; unwrapped (gradients are reduced over ranks by the caller).
        heads: the target's embedding and lm_head in the compute dtype.
        features: captured states of real tokens [T, L * D], samples concatenated.
        token_ids: [T]. loss_mask: [T]. cu_seqlens: [n + 1] rows where samples start.
        anchors: row in [0, T) of each block's anchor, ascending. anchor_sample: its sample, 0..n-1. Both may
            be
            empty: the sums are zero and every weight gets a zero gradient.
        objective: labels, loss and weighting.
        mask_token_id: fills slots 1..K-1.
        max_draft_slots: slots that go through the drafter at once; at least one block does.
        labels_T: the target's own token for each row, of `target_labels`; needed when `objective.labels` is
            "target", and then found from `last_hidden` when that is given instead.
        last_hidden: what the target's lm_head reads, [T, D]; needed for `objective.loss` "kl".
        backward: whether to compute gradients (else no graph is kept).
    """
    compute = heads.embed_VD.dtype
    if objective.labels == "target" and labels_T is None:
        assert last_hidden is not None, "labels of the target need labels_T or last_hidden"
        labels_T = target_labels(last_hidden, heads.head_VD, loss_mask, cu_seqlens)
    labels_T = token_ids if objective.labels == "data" else labels_T
    assert labels_T is not None
    agrees_T = labels_T == token_ids if objective.stop_at_disagreement else None
    assert objective.loss != "kl" or last_hidden is not None, "forward KL needs last_hidden"
    sums = LossSums.zeros(drafter.shape.block_size, features.device)
    with contextlib.nullcontext() if backward else torch.no_grad():
        context = project_microbatch(drafter, features.to(compute), cu_seqlens)
        leaves = [
            (k.detach().requires_grad_(backward), v.detach().requires_grad_(backward)) for k, v in context
        ]
        for blocks in _chunks(
            drafter, loss_mask, cu_seqlens, anchors, anchor_sample, agrees_T, max_draft_slots
        ):
            embeds_AKD = block_embeddings(heads, token_ids[blocks.anchor_A.long()], mask_token_id, drafter)
            hidden_PD = drafter.forward_blocks(
                embeds_AKD,
                leaves,
                context_start_A=blocks.context_start_A,
                anchor_A=blocks.anchor_A,
                keep_P=blocks.slot_P,
            )
            loss_sum, chunk_sums = _chunk_loss(heads, hidden_PD, blocks, labels_T, last_hidden, objective)
            if backward:
                loss_sum.backward()
            sums = sums + chunk_sums
    if backward:
        outputs = [x for pair in context for x in pair]
        torch.autograd.backward(outputs, [leaf.grad for pair in leaves for leaf in pair])
    return sums


def project_microbatch(drafter: DFlashDrafter, features: Tensor, cu_seqlens: Tensor) -> list[LayerContext]:
    """Keys and values of the whole context for each layer, rotated at positions within the samples."""
    row_T = torch.arange(len(features), device=features.device)
    bounds = cu_seqlens.to(features.device).long()
    start_T = bounds[torch.searchsorted(bounds, row_T, right=True) - 1]
    return drafter.project_layers(drafter.project_context(features), row_T - start_T)


def block_embeddings(
    heads: TargetHeads, anchor_token_A: Tensor, mask_token_id: int, drafter: DFlashDrafter
) -> Tensor:
    """[embedding of the anchor token, embedding of MASK x (K - 1)] for each block, [A, K, D]."""
    ids_AK = anchor_token_A.new_full((len(anchor_token_A), drafter.shape.block_size), mask_token_id)
    ids_AK[:, 0] = anchor_token_A
    return heads.embed_VD[ids_AK]


def _chunks(
    drafter: DFlashDrafter,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    anchors: Tensor,
    anchor_sample: Tensor,
    agrees_T: Tensor | None,
    max_draft_slots: int,
) -> Iterator[_Blocks]:
    """Whole blocks, at most `max_draft_slots` slots a chunk; one empty chunk when there is no anchor."""
    block_size = drafter.shape.block_size
    bounds = cu_seqlens.to(anchors.device).int()
    start_A, end_A = bounds[anchor_sample.long()], bounds[anchor_sample.long() + 1]
    anchor_A = anchors.int()
    supervised_AK = supervised_slots(loss_mask, anchor_A, end_A, block_size=block_size, agrees_T=agrees_T)
    blocks_a_chunk = max(1, max_draft_slots // block_size)
    for begin in range(0, max(1, len(anchor_A)), blocks_a_chunk):
        chunk = slice(begin, begin + blocks_a_chunk)
        supervised = supervised_AK[chunk]
        yield _Blocks(anchor_A[chunk], start_A[chunk], supervised, supervised.flatten().nonzero()[:, 0])


def _chunk_loss(
    heads: TargetHeads,
    hidden_PD: Tensor,
    blocks: _Blocks,
    labels_T: Tensor,
    last_hidden: Tensor | None,
    objective: ObjectiveConfig,
) -> tuple[Tensor, LossSums]:
    """Weighted loss of a chunk (with its graph) and its sums (without)."""
    num_blocks, block_size = blocks.supervised_AK.shape
    block_P, position_P = blocks.slot_P // block_size, blocks.slot_P % block_size
    row_P = blocks.anchor_A.long()[block_P] + position_P
    soft_target_PD = None
    if objective.loss == "kl":
        assert last_hidden is not None
        soft_target_PD = last_hidden[row_P - 1].to(heads.head_VD.dtype)
    result = linear_cross_entropy(hidden_PD, heads.head_VD, labels_T[row_P], soft_target_PD=soft_target_PD)
    if objective.weighting == "dpace":
        log_prob_AK = result.log_prob_P.new_zeros(num_blocks * block_size)
        log_prob_AK[blocks.slot_P] = result.log_prob_P
        log_prob_AK = log_prob_AK.view(num_blocks, block_size)
        weight_P = dpace_weights(log_prob_AK, blocks.supervised_AK, objective.dpace_alpha).flatten()[
            blocks.slot_P
        ]
    else:
        weight_P = decay_weights(block_size, objective.gamma).to(result.loss_P.device)[position_P]
    loss_sum = (weight_P * result.loss_P).sum(dtype=torch.float64)
    correct_AK = torch.zeros_like(blocks.supervised_AK).flatten()
    correct_AK[blocks.slot_P] = result.correct_P
    correct_AK = correct_AK.view(num_blocks, block_size)
    accepted_A = correct_AK[:, 1:].long().cumprod(dim=1).sum(dim=1)
    count = torch.tensor([num_blocks, num_blocks * block_size], device=loss_sum.device)
    return loss_sum, LossSums(
        loss_sum=loss_sum.detach(),
        weight_sum=weight_P.sum(dtype=torch.float64),
        correct_K=correct_AK.sum(dim=0),
        count_K=blocks.supervised_AK.sum(dim=0),
        accepted_sum=accepted_A.sum(),
        accepted_square_sum=(accepted_A * accepted_A).sum(),
        num_blocks=count[0],
        num_slots=count[1],
    )


@dataclass(frozen=True)
class LossArguments:
    """What is the same for every microbatch of a run."""

    heads: TargetHeads
    objective: ObjectiveConfig
    mask_token_id: int
    max_draft_slots: int
    device: torch.device


def loss_of(
    drafter: DFlashDrafter, microbatch: Microbatch, features: Features, same: LossArguments, *, backward: bool
) -> LossSums:
    """`microbatch_loss` of a microbatch and its captured states."""

    def on_device(array: object) -> torch.Tensor:
        return torch.as_tensor(array).to(same.device, non_blocking=True)

    return microbatch_loss(
        drafter,
        same.heads,
        features.hidden,
        on_device(microbatch.token_ids),
        on_device(microbatch.loss_mask),
        on_device(microbatch.cu_seqlens),
        on_device(microbatch.anchors),
        on_device(microbatch.anchor_sample),
        objective=same.objective,
        mask_token_id=same.mask_token_id,
        max_draft_slots=same.max_draft_slots,
        labels_T=features.labels,
        last_hidden=features.last_hidden,
        backward=backward,
    )
