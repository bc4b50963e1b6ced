"""Attention of draft blocks over a packed context.

Every block reads its sample's context before its anchor, and itself: the rule of `dflash_core.visibility`.
Three implementations of one signature, tested against each other:

- `block_attention_reference`: dense mask, a few lines, any dtype (float64 as the oracle);
- `block_attention` on CPU tensors: tiles of neighbouring blocks, cost proportional to the visible context;
- `block_attention` on CUDA tensors: `block_attention_triton`.

Shape letters: A blocks, K slots per block, T packed context rows, N query heads, G key/value heads,
H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_core.visibility import context_mask

# Blocks per CPU tile: more blocks give larger products, and more masked scores (slots of other blocks).
# A tile ends earlier when its anchors spread over more than TILE_SPREAD rows and a quarter of the context.
TILE_BLOCKS = 8
TILE_SPREAD = 64


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
    """Return softmax attention of each block's queries over its context rows and its own K slots.

    Differentiable in all five tensors.

    Args:
        q_AKNH: queries, already normed and rotated (this function sees rows, not rotary positions).
        k_ctx_TGH, v_ctx_TGH: keys and values of the packed context, samples concatenated; T may exceed the
            rows that any block sees.
        k_blk_AKGH, v_blk_AKGH: keys and values of the blocks' own slots. Query head n reads
            head n // (N // G).
        context_start_A: int32 [A], first packed row of the block's sample. Non-decreasing.
        anchor_A: int32 [A], packed row of the block's anchor, in [context_start, T]. Non-decreasing; equal
            anchors are allowed. So the blocks that see a given context row are one contiguous range. Both
            index tensors live on the device of `q_AKNH`; on CPU they are read on the host.
        sliding_window: None, or context row r is visible to slot k iff (anchor + k) - r < sliding_window.
            Own slots are always visible (the configuration keeps the window above the block size).
        scale: factor of the scores; None means H ** -0.5.

    Returns:
        out_AKNH in the dtype of `q_AKNH`. Scores, softmax and sums are float32 (float64 for float64 inputs).
        No tensor of [A * K, T] is made. Backward uses no atomics: it is bit-equal from call to call.
        A = 0 gives an empty result and zero gradients.
    """
    tensors = (q_AKNH, k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH)
    if q_AKNH.is_cuda:
        from dflash_core.kernels import block_attention_triton

        return block_attention_triton.block_attention(
            *tensors,
            context_start_A=context_start_A,
            anchor_A=anchor_A,
            sliding_window=sliding_window,
            scale=scale,
        )
    scale = q_AKNH.shape[-1] ** -0.5 if scale is None else scale
    return _TiledAttention.apply(*tensors, context_start_A, anchor_A, sliding_window, scale)


class _Tile(NamedTuple):
    """Neighbouring blocks of one sample, and the context rows that any of them sees.

    Scores of a tile are [slots, columns]: the context rows, then the slots of the tile's blocks. Every slot
    sees the columns between the two masks, so most of a long context needs no mask:

        columns      l | seen by all | r: rows from the first anchor on, own and other blocks
    """

    blocks: slice
    rows: slice
    # bool, True where a slot does not see one of the first columns; l = 0 without a window
    hidden_left_Ml: Tensor
    # bool, the same for the last columns
    hidden_right_Mr: Tensor

    @property
    def num_slots(self) -> int:
        return len(self.hidden_right_Mr)

    @property
    def num_scores(self) -> int:
        """Scores per query head."""
        return self.num_slots * (self.rows.stop - self.rows.start + self.num_slots)


def _tiles(
    context_start_A: Tensor, anchor_A: Tensor, block_size: int, sliding_window: int | None
) -> Iterator[_Tile]:
    """Cut the blocks into tiles: at most TILE_BLOCKS neighbours of one sample with anchors close together."""

    def hidden(blocks: slice, first_row: int, num_rows: int) -> Tensor:
        """Return bool [slots, num_rows], True where a slot does not see a row; from `first_row` on."""
        seen_AKr = context_mask(
            context_start_A[blocks] - first_row,
            anchor_A[blocks] - first_row,
            num_rows=num_rows,
            block_size=block_size,
            sliding_window=sliding_window,
        )
        return ~seen_AKr.flatten(0, 1)

    starts, anchors = context_start_A.tolist(), anchor_A.tolist()
    begin = 0
    while begin < len(anchors):
        start, end = starts[begin], begin + 1
        reach = max(TILE_SPREAD, (anchors[begin] - start) // 4)
        most = min(len(anchors), begin + TILE_BLOCKS)
        while end < most and starts[end] == start and anchors[end] - anchors[begin] <= reach:
            end += 1
        blocks, rows, num_left = slice(begin, end), slice(start, anchors[end - 1]), 0
        if sliding_window is not None:
            # first row that the first slot sees
            first = max(start, anchors[begin] + 1 - sliding_window)
            rows = slice(min(first, anchors[begin]), anchors[end - 1])
            all_see = max(start, anchors[end - 1] + block_size - sliding_window)
            num_left = min(all_see, anchors[begin]) - rows.start
        block_of_slot = torch.arange((end - begin) * block_size) // block_size
        other_block = block_of_slot[:, None] != block_of_slot
        right = hidden(blocks, anchors[begin], anchors[end - 1] - anchors[begin])
        left = hidden(blocks, rows.start, num_left)
        yield _Tile(blocks, rows, left, torch.cat([right, other_block], dim=1))
        begin = end


def _tile_keys(context: Tensor, block: Tensor, tile: _Tile, dtype: torch.dtype) -> Tensor:
    """Return keys or values of the context rows, then of the tile's own slots: [G, C, H]."""
    return torch.cat([context[tile.rows], block[tile.blocks].flatten(0, 1)]).to(dtype).transpose(0, 1)


def _tile_queries(x_AKNH: Tensor, tile: _Tile, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return the tile's queries grouped by key/value head: [G, (N / G) * blocks * K, H]."""
    x = x_AKNH[tile.blocks].flatten(0, 1).unflatten(1, (num_kv_heads, -1))  # [M, G, N / G, H]
    return x.permute(1, 2, 0, 3).flatten(1, 2).to(dtype)


def _score_buffer(tiles: list[_Tile], x_AKNH: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate the scores of the largest tile, for all tiles: fresh memory costs more than the products."""
    return torch.empty(x_AKNH.shape[2] * max((t.num_scores for t in tiles), default=0), dtype=dtype)


def _scores(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """Compute a @ b^T for each key/value head, in `buffer`."""
    size = (len(a), a.shape[1], b.shape[1])
    return torch.bmm(a, b.transpose(1, 2), out=buffer[: math.prod(size)].view(size))


def _tile_probabilities(q: Tensor, k: Tensor, tile: _Tile, buffer: Tensor) -> Tensor:
    """Return the softmax of the visible scores, [G, (N / G) * M, C]."""
    scores = _scores(q, k, buffer)
    by_head = scores.unflatten(1, (-1, tile.num_slots))
    num_left, num_right = tile.hidden_left_Ml.shape[1], tile.hidden_right_Mr.shape[1]
    by_head[..., :num_left].masked_fill_(tile.hidden_left_Ml, -torch.inf)
    by_head[..., -num_right:].masked_fill_(tile.hidden_right_Mr, -torch.inf)
    return torch.softmax(scores, dim=-1, out=scores)


class _TiledAttention(torch.autograd.Function):
    """The CPU path. Keeps its inputs and output; backward computes each tile's probabilities again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_AKNH: Tensor,
        k_ctx_TGH: Tensor,
        v_ctx_TGH: Tensor,
        k_blk_AKGH: Tensor,
        v_blk_AKGH: Tensor,
        context_start_A: Tensor,
        anchor_A: Tensor,
        sliding_window: int | None,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(q_AKNH.dtype, torch.float32)
        num_slots, num_kv_heads = q_AKNH.shape[1], k_ctx_TGH.shape[1]
        out_AKNH = torch.empty_like(q_AKNH, memory_format=torch.contiguous_format)
        tiles = list(_tiles(context_start_A, anchor_A, num_slots, sliding_window))
        buffer = _score_buffer(tiles, q_AKNH, wide)
        for tile in tiles:
            q = _tile_queries(q_AKNH, tile, num_kv_heads, wide).mul(scale)
            p = _tile_probabilities(q, _tile_keys(k_ctx_TGH, k_blk_AKGH, tile, wide), tile, buffer)
            out = torch.bmm(p, _tile_keys(v_ctx_TGH, v_blk_AKGH, tile, wide))
            _scatter_queries(out_AKNH, out, tile)
        ctx.save_for_backward(
            q_AKNH, k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH, context_start_A, anchor_A, out_AKNH
        )
        ctx.sliding_window, ctx.scale = sliding_window, scale
        return out_AKNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_AKNH, k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH, *rest = ctx.saved_tensors
        context_start_A, anchor_A, out_AKNH = rest
        grad_out_AKNH = grads[0]
        wide = torch.promote_types(q_AKNH.dtype, torch.float32)
        num_slots, num_kv_heads = q_AKNH.shape[1], k_ctx_TGH.shape[1]
        dq, dk_blk, dv_blk = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in (q_AKNH, k_blk_AKGH, v_blk_AKGH)
        )
        dk_ctx, dv_ctx = (torch.zeros(x.shape, dtype=wide) for x in (k_ctx_TGH, v_ctx_TGH))
        tiles = list(_tiles(context_start_A, anchor_A, num_slots, ctx.sliding_window))
        buffers = _score_buffer(tiles, q_AKNH, wide), _score_buffer(tiles, q_AKNH, wide)
        for tile in tiles:
            q = _tile_queries(q_AKNH, tile, num_kv_heads, wide).mul(ctx.scale)
            k = _tile_keys(k_ctx_TGH, k_blk_AKGH, tile, wide)
            v = _tile_keys(v_ctx_TGH, v_blk_AKGH, tile, wide)
            grad_out = _tile_queries(grad_out_AKNH, tile, num_kv_heads, wide)
            out = _tile_queries(out_AKNH, tile, num_kv_heads, wide)
            p = _tile_probabilities(q, k, tile, buffers[0])
            dv = torch.bmm(p.transpose(1, 2), grad_out)
            dp = _scores(grad_out, v, buffers[1])
            ds = dp.sub_((grad_out * out).sum(-1, keepdim=True)).mul_(p)
            _scatter_queries(dq, torch.bmm(ds, k).mul_(ctx.scale), tile)
            dk = torch.bmm(ds.transpose(1, 2), q)
            num_rows = tile.rows.stop - tile.rows.start
            for d, d_ctx, d_blk in ((dk, dk_ctx, dk_blk), (dv, dv_ctx, dv_blk)):
                d = d.transpose(0, 1)
                d_ctx[tile.rows] += d[:num_rows]
                d_blk[tile.blocks] = d[num_rows:].unflatten(0, (-1, num_slots)).to(d_blk.dtype)
        dk_ctx, dv_ctx = dk_ctx.to(k_ctx_TGH.dtype), dv_ctx.to(v_ctx_TGH.dtype)
        return dq, dk_ctx, dv_ctx, dk_blk, dv_blk, None, None, None, None


def _scatter_queries(out_AKNH: Tensor, x: Tensor, tile: _Tile) -> None:
    """Undo `_tile_queries` into the tile's blocks of `out_AKNH`."""
    x = x.unflatten(1, (-1, tile.num_slots)).permute(2, 0, 1, 3).flatten(1, 2)
    out_AKNH[tile.blocks] = x.unflatten(0, (-1, out_AKNH.shape[1])).to(out_AKNH.dtype)


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
    """Compute `block_attention` with a dense mask, for reading and for tests."""
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
    context_scores = torch.einsum("aknh,tnh->aknt", q, k_ctx)
    context_scores = context_scores.masked_fill(~visible_AKT[:, :, None], -torch.inf)
    block_scores = torch.einsum("aknh,ajnh->aknj", q, k_blk)
    p = torch.cat([context_scores, block_scores], dim=-1).softmax(dim=-1)
    p_context, p_block = p.split([k_ctx.shape[0], num_slots], dim=-1)
    out = torch.einsum("aknt,tnh->aknh", p_context, v_ctx) + torch.einsum("aknj,ajnh->aknh", p_block, v_blk)
    return out.to(q_AKNH.dtype)
