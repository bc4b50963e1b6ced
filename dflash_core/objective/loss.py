"""The loss of a microbatch, and its sums that combine over microbatches, steps and ranks.

Normalisation: everything here is a plain sum. A step's loss is the sum of `loss_sum` over its microbatches
and ranks divided by the sum of `weight_sum`, so the same samples give the same loss and gradient however they
are split. The caller divides the gradients once.

Price: a microbatch goes through the drafter in chunks of whole blocks, forward and backward per chunk. The
context is projected once, its gradient is summed over chunks and propagated once, so peak memory follows
`max_draft_slots` and not the number of anchors.

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
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.labels import supervised_slots
from dflash_core.objective.losses import LOSSES
from dflash_core.objective.weights import slot_weights
from dflash_core.run_statistics import Interval


class TargetEnds(NamedTuple):
    """The target's embedding and lm_head, frozen. Their dtype is the compute dtype of the drafter."""

    embed_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True)
class LossSettings:
    """Everything about the loss that is constant over a run."""

    ends: TargetEnds
    # Labels, loss and weighting.
    objective: ObjectiveConfig
    # Fills slots 1..K-1 of a block.
    mask_token_id: int
    # Slots that go through the drafter at once; at least one block does.
    max_draft_slots: int
    device: torch.device


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
        """Return the sums of no blocks."""
        scalar = torch.zeros((), dtype=torch.int64, device=device)
        position = torch.zeros(block_size, dtype=torch.int64, device=device)
        return cls(scalar.double(), scalar.double(), position, position, scalar, scalar, scalar, scalar)

    def loss(self) -> float:
        """Return the weighted mean loss; 0 when nothing is supervised."""
        return float(self.loss_sum / self.weight_sum) if float(self.weight_sum) else 0.0

    def accuracy_K(self) -> list[float]:
        """Return the share of correct slots by position; 0 at position 0 and where nothing is supervised."""
        return (self.correct_K.double() / self.count_K.clamp(min=1)).tolist()

    def simulated_acceptance_length(self) -> Interval:
        """Return the acceptance length of greedy drafts, bonus token included, with its 95% interval.

        1 + leading correct slots, averaged over blocks. The interval takes blocks as independent. Slots that
        are not supervised count as rejected, so it is a lower bound near the ends of answers.
        """
        blocks = int(self.num_blocks)
        if not blocks:
            return Interval(1.0, 1.0, 1.0)
        mean = float(self.accepted_sum) / blocks
        variance = max(0.0, float(self.accepted_square_sum) / blocks - mean * mean)
        half = 1.96 * math.sqrt(variance / blocks)
        return Interval(1 + mean, 1 + mean - half, 1 + mean + half)


class _Rows(NamedTuple):
    """The arrays of a microbatch, on the compute device."""

    token_ids_T: Tensor
    loss_mask_T: Tensor
    cu_seqlens: Tensor
    anchor_A: Tensor
    anchor_sample_A: Tensor


class _Blocks(NamedTuple):
    """A chunk of blocks, on the compute device."""

    anchor_A: Tensor
    context_start_A: Tensor
    supervised_AK: Tensor
    slot_P: Tensor  # flat index a * K + k of each supervised slot, a within the chunk


def microbatch_loss(
    drafter: DFlashDrafter,
    microbatch: Microbatch,
    features: Features,
    settings: LossSettings,
    *,
    backward: bool,
) -> LossSums:
    """Return the sums of one microbatch; with `backward`, add the gradient of `loss_sum` to `.grad`.

    Args:
        drafter: its `.grad` is accumulated into; unwrapped (gradients are reduced over ranks by the caller).
        microbatch: without anchors the sums are zero and every weight gets a zero gradient.
        features: captured states, on the device; with labels when the objective's are the target's, with the
            last hidden state for KL.
        settings: of the run.
        backward: whether to compute gradients (else no graph is kept).
    """
    ends, objective = settings.ends, settings.objective
    rows = _rows_on(settings.device, microbatch)
    labels_T = rows.token_ids_T if objective.labels == "data" else features.labels
    assert labels_T is not None, "labels of the target are part of the captured features"
    agrees_T = labels_T == rows.token_ids_T if objective.stop_at_disagreement else None
    sums = LossSums.zeros(drafter.shape.block_size, features.hidden.device)
    with contextlib.nullcontext() if backward else torch.no_grad():
        context = project_microbatch(drafter, features.hidden.to(ends.embed_VD.dtype), rows.cu_seqlens)
        leaves = [
            (k.detach().requires_grad_(backward), v.detach().requires_grad_(backward)) for k, v in context
        ]
        for blocks in draft_chunks(
            microbatch,
            settings.device,
            agrees_T,
            block_size=drafter.shape.block_size,
            max_draft_slots=settings.max_draft_slots,
        ):
            anchor_token_A = rows.token_ids_T[blocks.anchor_A.long()]
            hidden_PD = drafter.forward_blocks(
                block_embeddings(ends, anchor_token_A, settings.mask_token_id, drafter),
                leaves,
                context_start_A=blocks.context_start_A,
                anchor_A=blocks.anchor_A,
                keep_P=blocks.slot_P,
            )
            loss_sum, chunk_sums = _chunk_loss(
                hidden_PD, ends.head_VD, blocks, labels_T, features.last_hidden, objective
            )
            if backward:
                loss_sum.backward()
            sums = sums + chunk_sums
    if backward:
        outputs = [x for pair in context for x in pair]
        torch.autograd.backward(outputs, [leaf.grad for pair in leaves for leaf in pair])
    return sums


def project_microbatch(drafter: DFlashDrafter, features: Tensor, cu_seqlens: Tensor) -> list[LayerContext]:
    """Return keys and values of the whole context per layer, rotated at positions within the samples."""
    row_T = torch.arange(len(features), device=features.device)
    bounds = cu_seqlens.to(features.device).long()
    start_T = bounds[torch.searchsorted(bounds, row_T, right=True) - 1]
    return drafter.project_layers(drafter.project_context(features), row_T - start_T)


def block_embeddings(
    ends: TargetEnds, anchor_token_A: Tensor, mask_token_id: int, drafter: DFlashDrafter
) -> Tensor:
    """Return [embedding of the anchor token, embedding of MASK x (K - 1)] for each block, [A, K, D]."""
    ids_AK = anchor_token_A.new_full((len(anchor_token_A), drafter.shape.block_size), mask_token_id)
    ids_AK[:, 0] = anchor_token_A
    return ends.embed_VD[ids_AK]


def _rows_on(device: torch.device, microbatch: Microbatch) -> _Rows:
    """Copy a microbatch's arrays to the device."""
    arrays = (
        microbatch.token_ids,
        microbatch.loss_mask,
        microbatch.cu_seqlens,
        microbatch.anchors,
        microbatch.anchor_sample,
    )
    return _Rows(*(torch.as_tensor(array).to(device, non_blocking=True) for array in arrays))


def draft_chunks(
    microbatch: Microbatch,
    device: torch.device,
    agrees_T: Tensor | None,
    *,
    block_size: int,
    max_draft_slots: int,
) -> Iterator[_Blocks]:
    """Yield whole blocks, at most `max_draft_slots` slots per chunk; one empty chunk without anchors.

    Their slots are found on the host, so that it waits for no device, unless supervision ends where the
    target disagrees (`agrees_T`, on the device).
    """
    rows = _rows_on(torch.device("cpu") if agrees_T is None else device, microbatch)
    sample_A = rows.anchor_sample_A.long()
    start_A, end_A = rows.cu_seqlens[sample_A], rows.cu_seqlens[sample_A + 1]
    supervised_AK = supervised_slots(
        rows.loss_mask_T, rows.anchor_A, end_A, block_size=block_size, agrees_T=agrees_T
    )
    blocks_per_chunk = max(1, max_draft_slots // block_size)
    for begin in range(0, max(1, len(rows.anchor_A)), blocks_per_chunk):
        chunk = slice(begin, begin + blocks_per_chunk)
        supervised = supervised_AK[chunk]
        slot_P = supervised.flatten().nonzero()[:, 0]
        tensors = (rows.anchor_A[chunk], start_A[chunk], supervised, slot_P)
        yield _Blocks(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def _chunk_loss(
    hidden_PD: Tensor,
    head_VD: Tensor,
    blocks: _Blocks,
    labels_T: Tensor,
    last_hidden_TD: Tensor | None,
    objective: ObjectiveConfig,
) -> tuple[Tensor, LossSums]:
    """Return the weighted loss of a chunk (with its graph) and its sums (without)."""
    num_blocks, block_size = blocks.supervised_AK.shape
    block_P, position_P = blocks.slot_P // block_size, blocks.slot_P % block_size
    row_P = blocks.anchor_A.long()[block_P] + position_P
    target_hidden_PD = None if last_hidden_TD is None else last_hidden_TD[row_P - 1]
    result = LOSSES[objective.loss](hidden_PD, head_VD, labels_T[row_P], target_hidden_PD)
    weight_P = slot_weights(objective, blocks.supervised_AK, blocks.slot_P, result.log_prob_P)
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
