"""Block attention, the kernels: packed rows, no mask tensor, no atomics.

The queries of one key/value head are numbered as rows, row = (block * K + slot) * R + head of the group, and
a program takes TILE_ROWS consecutive rows whatever block they belong to. Two blocks of 16 slots with 4 heads
per group fill a tile of 128 rows, and one load of a key serves all of them:

    row      0 .. 63 | 64 .. 127
    block        0   |     1
    sees    [s0, a0) | [s1, a1)         context rows, plus the K slots of its own block

So every row sees one interval of context rows and one of slots, both known from `context_start_A` and
`anchor_A`. Keys that all rows of a tile see need no comparison; only the ends of the intervals are masked.
Because anchors ascend, the blocks that see a tile of context rows are one contiguous range (binary search):
one program sums the gradient of a key in a fixed order, so backward is bit-equal from call to call.

Work follows the visible context: 2 products per visible (row, key) pair forward, 3 (queries) + 4 (keys)
backward. A tile whose rows belong to two samples also passes, masked, over the keys between their contexts.
Masked ends come before the whole tiles in each kernel: fewer values stay live through the long loop.

Shape letters: A blocks, K slots per block, T packed context rows, N query heads, G key/value heads,
R = N / G, H head dim.
"""

import triton
import triton.language as tl

# one binary for every batch size
_UNSPECIALISED = ["num_blocks", "num_keys"]


@triton.jit
def _row_context(anchor_ptr, context_start_ptr, rows, K: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr):
    """Return the context interval [lo, hi) that each row sees; lo == hi where it sees none."""
    block = rows // (K * R)
    hi = tl.load(anchor_ptr + block)
    lo = tl.load(context_start_ptr + block)
    if WINDOW > 0:
        slot = rows // R - block * K
        lo = tl.minimum(tl.maximum(lo, hi + slot - WINDOW + 1), hi)
    return lo, hi


@triton.jit
def _row_slots(rows, K: tl.constexpr, R: tl.constexpr):
    """Return the interval of flat slots (block * K + slot) of each row's own block."""
    lo = rows // (K * R) * K
    return lo, lo + K


@triton.jit
def _split(first, full_lo, full_hi, last, TILE: tl.constexpr):
    """Cut [first, last) into two ends and a visible middle of whole tiles; return the middle's bounds."""
    if full_hi - full_lo < TILE:
        full_lo = last
        full_hi = last
    return full_lo, full_lo + (full_hi - full_lo) // TILE * TILE


@triton.jit
def _edge(j, num_left, first, full_lo, full_hi, last, TILE: tl.constexpr):
    """Return the start of tile j of the two ends, and where that end of the interval stops."""
    start = first + j * TILE
    limit = full_lo
    if j >= num_left:
        start = full_hi + (j - num_left) * TILE
        limit = last
    return start, limit


@triton.jit
def _query_base(row0, group, G: tl.constexpr, R: tl.constexpr, H: tl.constexpr):
    """Return the element offset of a tile in [A, K, N, H], which may hold more than 2**31 elements."""
    return tl.cast(row0 // R, tl.int64) * (G * R * H) + group * (R * H)


@triton.jit
def _query_offsets(row0, rows, G: tl.constexpr, R: tl.constexpr, H: tl.constexpr):
    """Return the element offsets of the rows of a tile from `_query_base`, in 32 bits."""
    return (rows // R - row0 // R) * (G * R * H) + rows % R * H


@triton.jit
def _query_rows(num_rows, group, G: tl.constexpr, R: tl.constexpr, H: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return this program's rows, the same clamped to existing rows, and the offsets of their queries.

    The first program takes the last rows: late anchors see most, so the longest programs start first.
    """
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS
    own_rows = row0 + tl.arange(0, TILE_ROWS)
    rows = tl.minimum(own_rows, num_rows - 1)
    return own_rows, rows, _query_base(row0, group, G, R, H), _query_offsets(row0, rows, G, R, H)


@triton.jit
def _context_tiles(
    anchor_ptr, context_start_ptr, rows,
    K: tl.constexpr, R: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Return each row's interval [lo, hi), their union cut as by `_split`, and the tiles of its two ends."""
    lo, hi = _row_context(anchor_ptr, context_start_ptr, rows, K, R, WINDOW)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    full_lo, full_hi = _split(first, tl.max(lo, 0), tl.min(hi, 0), last, TILE_KEYS)
    num_left = tl.cdiv(full_lo - first, TILE_KEYS)
    num_right = tl.cdiv(last - full_hi, TILE_KEYS)
    return lo, hi, first, full_lo, full_hi, last, num_left, num_right


@triton.jit
def _own_tiles(rows, K: tl.constexpr, R: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Return each row's interval [lo, hi) of slots, their union, and its number of tiles."""
    lo, hi = _row_slots(rows, K, R)
    first = tl.min(lo, 0)
    last = tl.max(hi, 0)
    return lo, hi, first, last, tl.cdiv(last - first, TILE_KEYS)


@triton.jit
def _load(ptr, offsets, row_mask, H: tl.constexpr, TILE_H: tl.constexpr, MASKED: tl.constexpr):
    """Load a [tile, TILE_H] tile; columns from H on, and masked rows, are zero."""
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
    """Add keys [key0, key0 + TILE_KEYS) to an online softmax, base 2: output, maximum and sum."""
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
    """Write the output and log2 of the softmax sum. One program: TILE_ROWS rows of one head."""
    group = tl.program_id(1)
    num_rows = num_blocks * (K * R)
    own_rows, rows, q_base, q_offsets = _query_rows(num_rows, group, G, R, H, TILE_ROWS)
    q = _load(q_ptr + q_base, q_offsets, own_rows < num_rows, H, TILE_H, False)
    acc = tl.zeros([TILE_ROWS, TILE_H], tl.float32)
    # finite, so that a tile which a row does not see leaves the row's sums as they are
    top = tl.full([TILE_ROWS], -1.0e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    GH: tl.constexpr = G * H

    k_ctx_ptr += group * H
    v_ctx_ptr += group * H
    k_blk_ptr += group * H
    v_blk_ptr += group * H
    lo, hi, first, full_lo, full_hi, last, num_left, num_right = _context_tiles(
        anchor_ptr, context_start_ptr, rows, K, R, WINDOW, TILE_KEYS
    )
    own_lo, own_hi, own_first, own_last, num_own = _own_tiles(rows, K, R, TILE_KEYS)
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
    """Add the part of keys [key0, key0 + TILE_KEYS) to dq (before the scale)."""
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
    """Write dq, and delta = sum(out * dout) for the keys. One program: TILE_ROWS rows of one head."""
    group = tl.program_id(1)
    num_rows = num_blocks * (K * R)
    own_rows, rows, q_base, q_offsets = _query_rows(num_rows, group, G, R, H, TILE_ROWS)
    mask = own_rows < num_rows
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
    lo, hi, first, full_lo, full_hi, last, num_left, num_right = _context_tiles(
        anchor_ptr, context_start_ptr, rows, K, R, WINDOW, TILE_KEYS
    )
    own_lo, own_hi, own_first, own_last, num_own = _own_tiles(rows, K, R, TILE_KEYS)
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
    """Add the part of rows [row0, row0 + TILE_ROWS) to dk (unscaled) and dv. Scores are [keys, rows]."""
    rows = row0 + tl.arange(0, TILE_ROWS)
    inside = rows < limit
    if MASKED:
        rows = tl.minimum(rows, limit - 1)
    base = _query_base(row0, group, G, R, H)
    offsets = _query_offsets(row0, rows, G, R, H)
    q = _load(q_ptr + base, offsets, inside, H, TILE_H, MASKED)
    do = _load(dout_ptr + base, offsets, inside, H, TILE_H, MASKED)
    if MASKED:
        # infinity where there is no row: probability 0
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))
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
    """Write dk and dv of context rows or (OWN) of slots: sums over the rows that see any of them.

    One program: TILE_KEYS keys of one key/value head. `ranges_ptr` is int32 [tiles, 4] of `_block_ranges`,
    and not read when OWN.
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
