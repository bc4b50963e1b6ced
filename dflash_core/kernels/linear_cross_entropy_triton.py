"""Vocabulary loss on CUDA: chunks of positions, library matrix products, one fused softmax kernel in between.

Same contract as `linear_cross_entropy.linear_cross_entropy`, whose reference is the oracle. Two facts
keep it cheap:

- The gradient of row p is `grad_loss[p] * u[p]` with `u[p] = (softmax(logits[p]) - q[p]) @ head`, and u
  needs neither the caller's weights nor the other rows. So forward computes u while a chunk's logits are
  live, backward is one elementwise product, and logits are never computed twice: two products per position
  instead of three.
- The products are plain ones, which the vendor's library runs near the peak of every chip; a fused Triton
  product over a vocabulary of 150K does not reach that. Triton adds the softmax and its gradient between
  them, at memory speed and without temporaries.

Logits of a chunk are float32 (bfloat16 ones would be off by up to 0.06 at a logit of 20). The kernel
overwrites each row in place with its gradient in the input's dtype, so a chunk costs 4 bytes per logit.
With `chunk_rows` positions at once, 1/32 of them, memory is 6.7% of the bfloat16 logits for the workspace
and D / V (2.7% at 4,096 / 151,936) for u. The head is read twice per chunk, which at 256 rows takes less
time than the arithmetic.

Shape letters: P positions, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_V = 2048
NUM_WARPS = 8


@triton.jit
def _exp(x):
    return tl.math.exp2(x * 1.4426950408889634)


@triton.jit
def _log(x):
    return tl.math.log2(x) * 0.6931471805599453


@triton.jit
def _accumulate(top, total, x):
    """Add x to an online sum of exp(x - top), lane by lane: no exchange between threads inside the loop."""
    new_top = tl.maximum(top, x)
    return new_top, total * _exp(top - new_top) + _exp(x - new_top)


@triton.jit
def _merge(top, total):
    """Return the lanes' maximum and the log of their sum of exp(x - maximum)."""
    row_top = tl.max(top, 0)
    return row_top, _log(tl.sum(total * _exp(top - row_top), 0))


@triton.jit
def row_kernel(
    logits_ptr, target_ptr, labels_ptr, gradient_ptr, loss_ptr, log_prob_ptr, correct_ptr,
    logits_stride, gradient_stride, num_words,
    SOFT: tl.constexpr, GRADIENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write loss, label log-probability and top-1 hit, then the gradient over the logits, in place.

    One program per row. Loads are 16 bytes wide where 16 divides `num_words`.

    SOFT: `target_ptr` holds the soft target's logits t, and the loss is
    KL = sum_v q (t - x) - lse(t) + lse(x) with q = softmax(t).

    GRADIENT: `gradient_ptr` is the memory of `logits_ptr` in the hidden dtype; an element of half the size
    lands at half the offset, on logits that have been read already.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    logits_ptr += row * logits_stride
    target_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    label = tl.load(labels_ptr + row)
    lane = tl.arange(0, TILE)
    # finite, and above the -2.0e30 that stands for a missing word, which therefore adds 0
    top = tl.full([TILE], -1.0e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    best = tl.full([TILE], 2147483647, tl.int32)
    target_top = tl.full([TILE], -1.0e30, tl.float32)
    target_total = tl.zeros([TILE], tl.float32)
    # sum of exp(t - target_top) (t - x)
    target_gap = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, num_words, TILE):
        word = start + lane
        x = tl.load(logits_ptr + word, mask=word < num_words, other=-2.0e30)
        best = tl.where(x > top, word, best)
        top, total = _accumulate(top, total, x)
        if SOFT:
            t = tl.load(target_ptr + word, mask=word < num_words, other=-2.0e30)
            shrink = _exp(target_top - tl.maximum(target_top, t))
            target_top, target_total = _accumulate(target_top, target_total, t)
            target_gap = target_gap * shrink + _exp(t - target_top) * (t - x)
    row_top, log_total = _merge(top, total)
    log_prob = tl.load(logits_ptr + label) - row_top - log_total
    hit = tl.min(tl.where(top == row_top, best, 2147483647), 0)
    tl.store(log_prob_ptr + row, log_prob)
    tl.store(correct_ptr + row, (hit == label).to(tl.int8))
    target_row_top, target_log_total = row_top, log_total
    if SOFT:
        target_row_top, target_log_total = _merge(target_top, target_total)
        gap = tl.sum(target_gap * _exp(target_top - target_row_top - target_log_total), 0)
        tl.store(loss_ptr + row, gap - (target_row_top - row_top) - (target_log_total - log_total))
    else:
        tl.store(loss_ptr + row, -log_prob)
    if GRADIENT:
        # the label's logit must be read before the gradient overwrites it
        tl.debug_barrier()
        for start in tl.range(0, num_words, TILE):
            word = start + lane
            x = tl.load(logits_ptr + word, mask=word < num_words, other=-2.0e30)
            gradient = _exp(x - row_top - log_total)
            if SOFT:
                t = tl.load(target_ptr + word, mask=word < num_words, other=-2.0e30)
                gradient -= _exp(t - target_row_top - target_log_total)
            else:
                gradient -= (word == label).to(tl.float32)
            # the first tile's gradient lands on logits of the same tile
            tl.debug_barrier()
            tl.store(gradient_ptr + word, gradient.to(gradient_ptr.dtype.element_ty), mask=word < num_words)


def chunk_rows(num_positions: int, *, soft: bool) -> int:
    """Return the positions per chunk: 1/32 of all, a multiple of 256 up to 1,024.

    256 is a whole tile of a product. A soft target, which needs a second set of logits, halves the number.
    7,680 positions (512 anchors of 16 slots) -> 256; 15,360 -> 512.
    """
    rows = min(1024, 256 * max(1, round(num_positions / 32 / 256)))
    return min(num_positions, rows // 2 if soft else rows)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Compute out = a @ b with float32 sums and a float32 result, whatever the dtype of the inputs."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    # the interpreter
    return torch.mm(a.float(), b.float(), out=out)


class _Workspace:
    """Logits of a chunk, rows padded to 16 words, so that they are aligned in either dtype."""

    def __init__(self, hidden: Tensor, head: Tensor, rows: int):
        self.num_words = len(head)
        padded = (self.num_words + 15) // 16 * 16
        self.logits = torch.empty(rows, padded, device=hidden.device, dtype=torch.float32)
        self.gradient = self.logits.view(hidden.dtype)

    def fill(self, hidden: Tensor, head: Tensor) -> Tensor:
        return _product(hidden, head.T, out=self.logits[: len(hidden), : self.num_words])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, soft_target, want_gradient):
        num_positions, num_words, soft = len(hidden), len(head), soft_target is not None
        loss, log_prob = torch.empty(2, num_positions, device=hidden.device, dtype=torch.float32)
        correct = torch.empty(num_positions, device=hidden.device, dtype=torch.int8)
        rows = chunk_rows(num_positions, soft=soft)
        work = _Workspace(hidden, head, rows)
        target_work = _Workspace(hidden, head, rows) if soft else work
        unit = torch.empty_like(hidden) if want_gradient else None
        unit_chunk = torch.empty(rows, hidden.shape[1], device=hidden.device, dtype=torch.float32)
        for start in range(0, num_positions, rows):
            chunk = slice(start, min(start + rows, num_positions))
            count = chunk.stop - chunk.start
            work.fill(hidden[chunk], head)
            if soft:
                target_work.fill(soft_target[chunk], head)
            row_kernel[(count,)](
                work.logits, target_work.logits, labels[chunk], work.gradient,
                loss[chunk], log_prob[chunk], correct[chunk],
                work.logits.stride(0), work.gradient.stride(0), num_words,
                SOFT=soft, GRADIENT=want_gradient, TILE=TILE_V,
                num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
            if unit is not None:
                unit[chunk] = _product(work.gradient[:count, :num_words], head, out=unit_chunk[:count])
        correct = correct.bool()
        ctx.mark_non_differentiable(log_prob, correct)
        if unit is not None:
            ctx.save_for_backward(unit)
        return loss, log_prob, correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        (unit,) = ctx.saved_tensors
        return torch.mul(unit, grad_loss[:, None], out=torch.empty_like(unit)), None, None, None, None


def linear_cross_entropy(
    hidden_PD: Tensor, head_VD: Tensor, labels_P: Tensor, *, soft_target_PD: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `linear_cross_entropy.linear_cross_entropy` on CUDA, in float32, bfloat16 or float16.

    Returns:
        loss_P, log_prob_P and correct_P, the fields of `VocabularyLoss`.
    """
    dtypes = hidden_PD.dtype, head_VD.dtype
    assert hidden_PD.dtype == head_VD.dtype and hidden_PD.element_size() <= 4, dtypes
    if len(hidden_PD) == 0:
        empty = hidden_PD.sum(dim=-1).float()
        return empty, empty.detach(), empty.detach().bool()
    soft_target = None if soft_target_PD is None else soft_target_PD.detach().to(hidden_PD.dtype).contiguous()
    want_gradient = torch.is_grad_enabled() and hidden_PD.requires_grad
    hidden, labels = hidden_PD.contiguous(), labels_P.contiguous()
    return _LinearCrossEntropy.apply(hidden, head_VD.detach(), labels, soft_target, want_gradient)
