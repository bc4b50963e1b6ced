"""Attention of draft blocks over a packed context: every block reads its sample's context before its anchor,
and itself.

The rule is `dflash_core.model.visibility`. Three implementations of one signature, tested against each other:

- `block_attention_reference`: dense mask, a few lines, any dtype (float64 as the oracle);
- `block_attention` on CPU tensors: tiles of neighbouring blocks, cost proportional to the visible context;
- `block_attention` on CUDA tensors: `block_attention_triton`.

Shape letters: A blocks, K slots a block, T packed context rows, N query heads, G key/value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.model.visibility import context_mask


def block_attention(
    q_AKNH: Tensor,
    k_ctx_TGH: Tensor,
    v_ctx_TGH: Tensor,
    k_blk_AKGH: Tensor,
    v_blk_AKGH: Tensor,
    *,
    context_start_A: Tensor,
    anchor_A: Tensor,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of each block's queries over its context rows and its own K slots. Differentiable in
    all five.

    Args:
        q_AKNH: queries, normed and rotated already (this function knows rows, not rotary positions).
        k_ctx_TGH, v_ctx_TGH: keys and values of the packed context, samples concatenated; T may exceed what
            is seen.
        k_blk_AKGH, v_blk_AKGH: keys and values of the blocks' own slots. Query head n reads head n // (N //
            G).
        context_start_A: int32 [A], first packed row of the block's sample. Non-decreasing.
        anchor_A: int32 [A], packed row of the block's anchor, in [context_start, T]. Non-decreasing; equal
            anchors are allowed. So the blocks that see a given context row are one contiguous range. Both
            index tensors live on the device of `q_AKNH`; on CPU they are read on the host.
        sliding_window: None, or context row r is visible to slot k iff (anchor + k) - r < sliding_window.
            Own slots are always visible (the configuration keeps the window above the block size).
        scale: of the scores; None: H ** -0.5.

    Returns:
        out_AKNH in the dtype of `q_AKNH`. Scores, softmax and sums are float32 (float64 for float64 inputs).
        No tensor of [A * K, T] is made. Backward uses no atomics: bit-equal from call to call.
        A = 0 gives an empty result and zero gradients.
    """
    if q_AKNH.is_cuda:
        from dflash_core.kernels import block_attention_triton

        return block_attention_triton.block_attention(
            q_AKNH,
            k_ctx_TGH,
            v_ctx_TGH,
            k_blk_AKGH,
            v_blk_AKGH,
            context_start_A=context_start_A,
            anchor_A=anchor_A,
            sliding_window=sliding_window,
            scale=scale,
        )
    return block_attention_reference(
        q_AKNH,
        k_ctx_TGH,
        v_ctx_TGH,
        k_blk_AKGH,
        v_blk_AKGH,
        context_start_A=context_start_A,
        anchor_A=anchor_A,
        sliding_window=sliding_window,
        scale=scale,
    )


def block_attention_reference(
    q_AKNH: Tensor,
    k_ctx_TGH: Tensor,
    v_ctx_TGH: Tensor,
    k_blk_AKGH: Tensor,
    v_blk_AKGH: Tensor,
    *,
    context_start_A: Tensor,
    anchor_A: Tensor,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`block_attention` with a dense mask, for reading and for tests."""
    num_slots, num_heads, head_dim = q_AKNH.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    accumulate = torch.promote_types(q_AKNH.dtype, torch.float32)
    group = num_heads // k_ctx_TGH.shape[1]
    q = q_AKNH.to(accumulate) * scale
    k_ctx, v_ctx, k_blk, v_blk = (
        x.to(accumulate).repeat_interleave(group, dim=-2)
        for x in (k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH)
    )
    visible_AKT = context_mask(
        context_start_A,
        anchor_A,
        num_rows=k_ctx.shape[0],
        block_size=num_slots,
        sliding_window=sliding_window,
    )
    context_scores = torch.einsum("aknh,tnh->aknt", q, k_ctx).masked_fill(
        ~visible_AKT[:, :, None], -torch.inf
    )
    block_scores = torch.einsum("aknh,ajnh->aknj", q, k_blk)
    p = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1)
    p_context, p_block = p.split([k_ctx.shape[0], num_slots], dim=-1)
    out = torch.einsum("aknt,tnh->aknh", p_context, v_ctx) + torch.einsum("aknj,ajnh->aknh", p_block, v_blk)
    return out.to(q_AKNH.dtype)
