"""Block attention on CUDA: three kernels over packed rows, no mask tensor, no atomics.

Same contract as `block_attention.block_attention`, whose reference is the oracle of these kernels. The
queries of one key/value head are numbered as rows, row = (block * K + slot) * R + head of the group, and a
program takes TILE_ROWS consecutive rows whatever block they belong to. Two blocks of 16 slots with 4 heads
a group fill a tile of 128 rows, and one load of a key serves all of them:

    row      0 .. 63 | 64 .. 127
    block        0   |     1
    sees    [s0, a0) | [s1, a1)         context rows, plus the K slots of its own block

So every row sees one interval of context rows and one of slots, both known from `context_start_A` and
`anchor_A`. Keys that all rows of a tile see are taken without a comparison; only the ends of the intervals
are masked. Because anchors ascend, the blocks that see a tile of context rows are one contiguous range
(binary search): the gradient of a key is summed by one program in a fixed order, so backward is bit-equal
from call to call.

Work follows the visible context: 2 products a visible (row, key) pair forward, 3 (queries) + 4 (keys)
backward. A tile whose rows belong to two samples also passes over, masked, what lies between their
contexts. `tiles` holds the launch shapes, by architecture and head size: what fits in shared memory and
registers without spilling, as `benchmarks/kernels_aot.py` finds by compiling for each chip.

Shape letters: A blocks, K slots a block, T packed context rows, N query heads, G key/value heads, R = N /
G, H head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
_UNSPECIALISED = ["num_blocks", "num_keys"]  # one binary for every batch size


@triton.jit
def _row_context(anchor_ptr, context_start_ptr, rows, K: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr):
    """The context interval [lo, hi) that each row sees; lo == hi where it sees none."""
    block = rows // (K * R)
    hi = tl.load(anchor_ptr + block)
    lo = tl.load(context_start_ptr + block)
    if WINDOW > 0:
        slot = rows // R - block * K
        lo = tl.minimum(tl.maximum(lo, hi + slot - WINDOW + 1), hi)
    return lo, hi


@triton.jit
def _row_slots(rows, K: tl.constexpr, R: tl.constexpr):
    """The interval of flat slots (block * K + slot) of each row's own block."""
    lo = rows // (K * R) * K
    return lo, lo + K


@triton.jit
def _split(first, full_lo, full_hi, last, TILE: tl.constexpr):
    """Cut [first, last) into two ends and a fully visible middle of whole tiles: the middle's bounds."""
    if full_hi - full_lo < TILE:
        full_lo = last
        full_hi = last
    return full_lo, full_lo + (full_hi - full_lo) // TILE * TILE


@triton.jit
def _edge(j, num_left, first, full_lo, full_hi, last, TILE: tl.constexpr):
    """Tile j of the two ends: its start, and where its end of the interval stops."""
    start = first + j * TILE
    limit = full_lo
    if j >= num_left:
        start = full_hi + (j - num_left) * TILE
        limit = last
    return start, limit


@triton.jit
def _query_base(row0, group, G: tl.constexpr, R: tl.constexpr, H: tl.constexpr):
    """Element offset of a tile in a [A, K, N, H] tensor, which may hold more than 2**31 elements."""
    return tl.cast(row0 // R, tl.int64) * (G * R * H) + group * (R * H)


@triton.jit
def _query_offsets(row0, rows, G: tl.constexpr, R: tl.constexpr, H: tl.constexpr):
    """Element offsets of the rows of a tile from `_query_base`, in 32 bits."""
    return (rows // R - row0 // R) * (G * R * H) + rows % R * H


@triton.jit
def _load(ptr, offsets, row_mask, H: tl.constexpr, TILE_H: tl.constexpr, MASKED: tl.constexpr):
    """A [tile, TILE_H] tile; columns from H on, and masked rows, are zero."""
    column = tl.arange(0, TILE_H)
    pointers = ptr + offsets[:, None] + column[None, :]
    if MASKED and TILE_H != H:
        return tl.load(pointers, mask=row_mask[:, None] & (column < H)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=row_mask[:, None], other=0.0)
    elif TILE_H != H:
        return tl.load(pointers, mask=(column < H)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(ptr, offsets, row_mask, value, H: tl.constexpr, TILE_H: tl.constexpr):
    column = tl.arange(0, TILE_H)
    mask = row_mask[:, None] & (column < H)[None, :]
    tl.store(ptr + offsets[:, None] + column[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    acc, top, total, q, k_ptr, v_ptr, key0, limit, lo, hi, scale,
    GH: tl.constexpr, H: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_H: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [key0, key0 + TILE_KEYS): `acc` output, `top` maximum, `total` sum, base 2."""
    keys = key0 + tl.arange(0, TILE_KEYS)
    base = tl.cast(key0, tl.int64) * GH
    offsets = tl.arange(0, TILE_KEYS) * GH
    inside = keys < limit
    k = _load(k_ptr + base, offsets, inside, H, TILE_H, MASKED)
    v = _load(v_ptr + base, offsets, inside, H, TILE_H, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        visible = (keys[None, :] >= lo[:, None]) & (keys[None, :] < tl.minimum(hi, limit)[:, None])
        s = tl.where(visible, s, -float("inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=_UNSPECIALISED)
def forward_kernel(
    q_ptr, k_ctx_ptr, v_ctx_ptr, k_blk_ptr, v_blk_ptr, context_start_ptr, anchor_ptr, out_ptr, lse_ptr,
    num_blocks, scale_log2,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS rows of one key/value head. Writes the output and log2 of the softmax sum."""
    group = tl.program_id(1)
    num_rows = num_blocks * (K * R)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS  # late anchors see most: they start first
    own_rows = row0 + tl.arange(0, TILE_ROWS)
    rows = tl.minimum(own_rows, num_rows - 1)
    q_base = _query_base(row0, group, G, R, H)
    q_offsets = _query_offsets(row0, rows, G, R, H)
    q = _load(q_ptr + q_base, q_offsets, own_rows < num_rows, H, TILE_H, False)
    acc = tl.zeros([TILE_ROWS, TILE_H], tl.float32)
    top = tl.full(
        [TILE_ROWS], -1.0e30, tl.float32
    )  # finite: a tile that a row does not see leaves it as it is
    total = tl.zeros([TILE_ROWS], tl.float32)
    GH: tl.constexpr = G * H

    k_ctx_ptr += group * H
    v_ctx_ptr += group * H
    k_blk_ptr += group * H
    v_blk_ptr += group * H
    lo, hi = _row_context(anchor_ptr, context_start_ptr, rows, K, R, WINDOW)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    full_lo, full_hi = _split(first, tl.max(lo, 0), tl.min(hi, 0), last, TILE_KEYS)
    own_lo, own_hi = _row_slots(rows, K, R)
    own_first = tl.min(own_lo, 0)
    own_last = tl.max(own_hi, 0)
    num_own = tl.cdiv(own_last - own_first, TILE_KEYS)
    num_left = tl.cdiv(full_lo - first, TILE_KEYS)
    num_right = tl.cdiv(last - full_hi, TILE_KEYS)
    for j in tl.range(0, num_own + num_left + num_right, num_stages=1):
        key0, limit = _edge(j - num_own, num_left, first, full_lo, full_hi, last, TILE_KEYS)
        k_ptr, v_ptr, tile_lo, tile_hi = k_ctx_ptr, v_ctx_ptr, lo, hi
        if j < num_own:
            key0, limit = own_first + j * TILE_KEYS, own_last
            k_ptr, v_ptr, tile_lo, tile_hi = k_blk_ptr, v_blk_ptr, own_lo, own_hi
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, v_ptr, key0, limit, tile_lo, tile_hi, scale_log2,
            GH, H, TILE_KEYS, TILE_H, True, PRECISION,
        )  # fmt: skip
    for key0 in tl.range(full_lo, full_hi, TILE_KEYS):
        acc, top, total = _attend(
            acc, top, total, q, k_ctx_ptr, v_ctx_ptr, key0, last, lo, hi, scale_log2,
            GH, H, TILE_KEYS, TILE_H, False, PRECISION,
        )  # fmt: skip
    mask = own_rows < num_rows
    _store(out_ptr + q_base, q_offsets, mask, acc / total[:, None], H, TILE_H)
    tl.store(lse_ptr + group * num_rows + own_rows, top + tl.math.log2(total), mask=mask)


@triton.jit
def _query_gradient(
    dq, q, do, lse, delta, k_ptr, v_ptr, key0, limit, lo, hi, scale_log2,
    GH: tl.constexpr, H: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_H: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the part of keys [key0, key0 + TILE_KEYS) to dq (before the scale)."""
    keys = key0 + tl.arange(0, TILE_KEYS)
    base = tl.cast(key0, tl.int64) * GH
    offsets = tl.arange(0, TILE_KEYS) * GH
    inside = keys < limit
    k = _load(k_ptr + base, offsets, inside, H, TILE_H, MASKED)
    v = _load(v_ptr + base, offsets, inside, H, TILE_H, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        visible = (keys[None, :] >= lo[:, None]) & (keys[None, :] < tl.minimum(hi, limit)[:, None])
        s = tl.where(visible, s, -float("inf"))
    p = tl.math.exp2(s * scale_log2 - lse[:, None])
    ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def backward_queries_kernel(
    q_ptr, k_ctx_ptr, v_ctx_ptr, k_blk_ptr, v_blk_ptr, context_start_ptr, anchor_ptr, out_ptr, lse_ptr,
    dout_ptr, dq_ptr, delta_ptr, num_blocks, scale, scale_log2,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: TILE_ROWS rows of one head. Writes dq, and delta = sum(out * dout) for the keys."""
    group = tl.program_id(1)
    num_rows = num_blocks * (K * R)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS
    own_rows = row0 + tl.arange(0, TILE_ROWS)
    mask = own_rows < num_rows
    rows = tl.minimum(own_rows, num_rows - 1)
    q_base = _query_base(row0, group, G, R, H)
    q_offsets = _query_offsets(row0, rows, G, R, H)
    do = _load(dout_ptr + q_base, q_offsets, mask, H, TILE_H, False)
    out = _load(out_ptr + q_base, q_offsets, mask, H, TILE_H, False)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + group * num_rows + own_rows, delta, mask=mask)
    q = _load(q_ptr + q_base, q_offsets, mask, H, TILE_H, False)
    lse = tl.load(lse_ptr + group * num_rows + rows)
    dq = tl.zeros([TILE_ROWS, TILE_H], tl.float32)
    GH: tl.constexpr = G * H

    k_ctx_ptr += group * H
    v_ctx_ptr += group * H
    k_blk_ptr += group * H
    v_blk_ptr += group * H
    lo, hi = _row_context(anchor_ptr, context_start_ptr, rows, K, R, WINDOW)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    full_lo, full_hi = _split(first, tl.max(lo, 0), tl.min(hi, 0), last, TILE_KEYS)
    own_lo, own_hi = _row_slots(rows, K, R)
    own_first = tl.min(own_lo, 0)
    own_last = tl.max(own_hi, 0)
    num_own = tl.cdiv(own_last - own_first, TILE_KEYS)
    num_left = tl.cdiv(full_lo - first, TILE_KEYS)
    num_right = tl.cdiv(last - full_hi, TILE_KEYS)
    for j in tl.range(0, num_own + num_left + num_right, num_stages=1):
        key0, limit = _edge(j - num_own, num_left, first, full_lo, full_hi, last, TILE_KEYS)
        k_ptr, v_ptr, tile_lo, tile_hi = k_ctx_ptr, v_ctx_ptr, lo, hi
        if j < num_own:
            key0, limit = own_first + j * TILE_KEYS, own_last
            k_ptr, v_ptr, tile_lo, tile_hi = k_blk_ptr, v_blk_ptr, own_lo, own_hi
        dq = _query_gradient(
            dq, q, do, lse, delta, k_ptr, v_ptr, key0, limit, tile_lo, tile_hi, scale_log2,
            GH, H, TILE_KEYS, TILE_H, True, PRECISION,
        )  # fmt: skip
    for key0 in tl.range(full_lo, full_hi, TILE_KEYS):
        dq = _query_gradient(
            dq, q, do, lse, delta, k_ctx_ptr, v_ctx_ptr, key0, last, lo, hi, scale_log2,
            GH, H, TILE_KEYS, TILE_H, False, PRECISION,
        )  # fmt: skip
    _store(dq_ptr + q_base, q_offsets, mask, dq * scale, H, TILE_H)


@triton.jit
def _key_gradient(
    dk, dv, k, v, keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, context_start_ptr, anchor_ptr,
    row0, limit, group, scale_log2,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_H: tl.constexpr,
    OWN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what rows [row0, row0 + TILE_ROWS) give to dk (unscaled) and dv. Scores are [keys, rows]."""
    rows = row0 + tl.arange(0, TILE_ROWS)
    inside = rows < limit
    if MASKED:
        rows = tl.minimum(rows, limit - 1)
    base = _query_base(row0, group, G, R, H)
    offsets = _query_offsets(row0, rows, G, R, H)
    q = _load(q_ptr + base, offsets, inside, H, TILE_H, MASKED)
    do = _load(dout_ptr + base, offsets, inside, H, TILE_H, MASKED)
    if MASKED:
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))  # no row: probability 0
    else:
        lse = tl.load(lse_ptr + rows)
    delta = tl.load(delta_ptr + rows)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        if OWN:
            lo, hi = _row_slots(rows, K, R)
        else:
            lo, hi = _row_context(anchor_ptr, context_start_ptr, rows, K, R, WINDOW)
        visible = (keys[:, None] >= lo[None, :]) & (keys[:, None] < hi[None, :])
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_UNSPECIALISED)
def backward_keys_kernel(
    q_ptr, k_ptr, v_ptr, context_start_ptr, anchor_ptr, lse_ptr, dout_ptr, delta_ptr,
    dk_ptr, dv_ptr, ranges_ptr,
    num_blocks, num_keys, scale, scale_log2,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_H: tl.constexpr,
    OWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: TILE_KEYS keys of one head, context rows or (OWN) slots; sums over the rows that see any.

    `ranges_ptr`: int32 [tiles, 4] of `_block_ranges`, not read when OWN.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    num_rows = num_blocks * (K * R)
    keys = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    key_base = tl.cast(tile, tl.int64) * (TILE_KEYS * G * H) + group * H
    key_offsets = tl.arange(0, TILE_KEYS) * (G * H)
    key_mask = keys < num_keys
    k = _load(k_ptr + key_base, key_offsets, key_mask, H, TILE_H, True)
    v = _load(v_ptr + key_base, key_offsets, key_mask, H, TILE_H, True)
    dk = tl.zeros([TILE_KEYS, TILE_H], tl.float32)
    dv = tl.zeros([TILE_KEYS, TILE_H], tl.float32)
    lse_ptr += group * num_rows
    delta_ptr += group * num_rows
    if OWN:
        first = tile * TILE_KEYS // K * (K * R)
        last = tl.minimum(tl.cdiv((tile + 1) * TILE_KEYS, K) * (K * R), num_rows)
        full_lo = last
        full_hi = last
    else:
        first = tl.load(ranges_ptr + tile * 4) * (K * R)
        full_lo = tl.load(ranges_ptr + tile * 4 + 1) * (K * R)
        full_hi = tl.load(ranges_ptr + tile * 4 + 2) * (K * R)
        last = tl.load(ranges_ptr + tile * 4 + 3) * (K * R)
        full_lo, full_hi = _split(first, full_lo, full_hi, last, TILE_ROWS)
    num_left = tl.cdiv(full_lo - first, TILE_ROWS)
    for j in tl.range(0, num_left + tl.cdiv(last - full_hi, TILE_ROWS), num_stages=1):
        row0, limit = _edge(j, num_left, first, full_lo, full_hi, last, TILE_ROWS)
        dk, dv = _key_gradient(
            dk, dv, k, v, keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, context_start_ptr, anchor_ptr,
            row0, limit, group, scale_log2, G, R, K, H, WINDOW, TILE_ROWS, TILE_H, OWN, True, PRECISION,
        )  # fmt: skip
    if not OWN:
        for row0 in tl.range(full_lo, full_hi, TILE_ROWS):
            dk, dv = _key_gradient(
                dk, dv, k, v, keys, q_ptr, dout_ptr, lse_ptr, delta_ptr, context_start_ptr, anchor_ptr,
                row0, last, group, scale_log2, G, R, K, H, WINDOW, TILE_ROWS, TILE_H, OWN, False, PRECISION,
            )  # fmt: skip
    _store(dk_ptr + key_base, key_offsets, key_mask, dk * scale, H, TILE_H)
    _store(dv_ptr + key_base, key_offsets, key_mask, dv, H, TILE_H)


class Tiles(NamedTuple):
    """Launch shape of one kernel."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# (kernel, widest head): sm_90 (operands in shared memory), sm_100 (sums in tensor memory), sm_80 and sm_120
_TILES = {
    ("forward", 64): (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
    ("forward", 128): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ("forward", 256): (Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2)),
    ("backward_queries", 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ("backward_queries", 128): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    ("backward_queries", 256): (Tiles(128, 32, 8, 1), Tiles(128, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("backward_keys", 64): (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2)),
    ("backward_keys", 128): (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2)),
    ("backward_keys", 256): (Tiles(32, 32, 8, 1), Tiles(64, 64, 8, 1), Tiles(32, 32, 8, 1)),
}


def tiles(kernel: str, head_dim: int, itemsize: int, capability: int) -> Tiles:
    """Tiles of "forward", "backward_queries" or "backward_keys", for head_dim up to 256.

    Args:
        itemsize: bytes of an input element. float32 products run on ordinary cores: small tiles.
        capability: 80, 90, 100, 120: compute capability times ten.
    """
    if itemsize == 4:
        return Tiles(32, 32, 4, 1) if head_dim <= 128 else Tiles(16, 16, 4, 1)
    widest = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return _TILES[kernel, widest][0 if 90 <= capability < 100 else 1 if 100 <= capability < 110 else 2]


def launch_constants(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments that follow from the inputs alone."""
    return {
        "H": head_dim,
        "TILE_H": max(16, triton.next_power_of_2(head_dim)),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",  # has a meaning for float32 inputs only
    }


def _block_ranges(
    context_start_A: Tensor, anchor_A: Tensor, *, num_keys: int, tile_keys: int, block_size: int, window: int
) -> Tensor:
    """Which blocks see each tile of context rows: int32 [tiles, 4], ranges [0]:[3] in part and [1]:[2] whole.

    Tile [t0, t1): blocks with anchor > t0 and context_start < t1 see some of it, those with anchor >= t1 and
    context_start <= t0 see all of it. Both inputs ascend, so each set is a range. With anchors 3, 6, 9 of one
    sample and tiles of 4 rows: tile [4, 8) is seen by blocks [1, 3) and seen whole by [2, 3).
    """
    t0 = torch.arange(0, num_keys, tile_keys, device=anchor_A.device, dtype=anchor_A.dtype)
    t1 = (t0 + tile_keys).clamp(max=num_keys)
    first = torch.searchsorted(anchor_A, t0, right=True)
    full_first = torch.searchsorted(anchor_A, t1)
    last = torch.searchsorted(context_start_A, t1)
    full_last = torch.searchsorted(context_start_A, t0, right=True)
    if window > 0:  # slot 0 sees rows > anchor - window, slot K - 1 rows > anchor + K - 1 - window
        last = torch.minimum(last, torch.searchsorted(anchor_A, t1 - 1 + window))
        full_last = torch.minimum(full_last, torch.searchsorted(anchor_A, t0 + window - (block_size - 1)))
    last = torch.maximum(first, last)
    full_first = torch.minimum(full_first, last)
    full_last = full_last.clamp(max=last).clamp(min=full_first)
    return torch.stack([first, full_first, full_last, last], dim=1).to(torch.int32)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k_ctx, v_ctx, k_blk, v_blk, context_start, anchor, window, scale):
        num_blocks, block_size, num_heads, head_dim = q.shape
        groups = k_ctx.shape[1]
        constants = {"G": groups, "R": num_heads // groups, "K": block_size, "WINDOW": window}
        constants |= launch_constants(head_dim, q.dtype)
        out = torch.empty_like(q)
        lse = torch.empty(
            groups, num_blocks * block_size * constants["R"], device=q.device, dtype=torch.float32
        )
        shape = tiles("forward", head_dim, q.element_size(), _capability(q))
        forward_kernel[(triton.cdiv(lse.shape[1], shape.rows), groups)](
            q, k_ctx, v_ctx, k_blk, v_blk, context_start, anchor, out, lse, num_blocks, scale * LOG2_E,
            **constants, **_launch(shape),
        )  # fmt: skip
        ctx.save_for_backward(q, k_ctx, v_ctx, k_blk, v_blk, context_start, anchor, out, lse)
        ctx.constants, ctx.scale = constants, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k_ctx, v_ctx, k_blk, v_blk, context_start, anchor, out, lse = ctx.saved_tensors
        constants, scale, dout = ctx.constants, ctx.scale, dout.contiguous()
        num_blocks, block_size, _, head_dim = q.shape
        groups = constants["G"]
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        shape = tiles("backward_queries", head_dim, q.element_size(), _capability(q))
        backward_queries_kernel[(triton.cdiv(lse.shape[1], shape.rows), groups)](
            q, k_ctx, v_ctx, k_blk, v_blk, context_start, anchor, out, lse, dout, dq, delta,
            num_blocks, scale, scale * LOG2_E, **constants, **_launch(shape),
        )  # fmt: skip
        shape = tiles("backward_keys", head_dim, q.element_size(), _capability(q))
        ranges = _block_ranges(
            context_start, anchor, num_keys=k_ctx.shape[0], tile_keys=shape.keys, block_size=block_size,
            window=constants["WINDOW"],
        )  # fmt: skip
        gradients = []
        for own, k, v in ((False, k_ctx, v_ctx), (True, k_blk, v_blk)):
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            num_keys = k.numel() // (groups * head_dim)
            if num_keys:
                backward_keys_kernel[(triton.cdiv(num_keys, shape.keys), groups)](
                    q, k, v, context_start, anchor, lse, dout, delta, dk, dv, ranges,
                    num_blocks, num_keys, scale, scale * LOG2_E, OWN=own, **constants, **_launch(shape),
                )  # fmt: skip
            gradients += [dk, dv]
        return dq, *gradients, None, None, None, None


def _launch(shape: Tiles) -> dict[str, Any]:
    return {
        "TILE_ROWS": shape.rows,
        "TILE_KEYS": shape.keys,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        "enable_fp_fusion": True,
    }


def _capability(x: Tensor) -> int:
    if not x.is_cuda:
        return 90  # the interpreter
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


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
    """`dflash_core.kernels.block_attention.block_attention` on CUDA, float32, bfloat16 or float16.

    That `context_start_A` and `anchor_A` ascend is asserted on the device, without waiting for it.
    """
    scale = q_AKNH.shape[-1] ** -0.5 if scale is None else scale
    assert scale > 0 and (sliding_window is None or sliding_window > 0), (scale, sliding_window)
    assert q_AKNH.element_size() <= 4 and q_AKNH.is_floating_point(), q_AKNH.dtype
    tensors = [x.contiguous() for x in (q_AKNH, k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH)]
    context_start = context_start_A.to(torch.int32).contiguous()
    anchor = anchor_A.to(torch.int32).contiguous()
    if len(anchor) == 0:
        return q_AKNH + sum(x.sum() for x in tensors[1:])  # empty, and differentiable in all five
    ascending = (
        (anchor.diff() >= 0).all() & (context_start.diff() >= 0).all() & (context_start <= anchor).all()
    )
    torch._assert_async(ascending, "context_start_A and anchor_A must ascend, context_start_A <= anchor_A")
    return _BlockAttention.apply(*tensors, context_start, anchor, sliding_window or 0, scale)
