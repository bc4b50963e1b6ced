"""Block attention on CUDA: launches and gradients of the kernels in `block_attention_triton_kernels`.

Same contract as `block_attention.block_attention`, whose reference is the oracle of these kernels. `tiles`
holds the launch shapes by architecture and head size: those that fit in shared memory and registers
without spilling, found by compiling for each chip (`benchmarks/kernels_aot.py`). They were chosen without
a GPU to time them.

Shape letters: A blocks, K slots per block, T packed context rows, N query heads, G key/value heads,
R = N / G, H head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dflash_core.kernels.block_attention_triton_kernels import (
    backward_keys_kernel,
    backward_queries_kernel,
    forward_kernel,
)

LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """Launch shape of one kernel."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# (kernel, widest head): sm_90 (operands in shared memory), sm_100 (sums in tensor memory), sm_80 and sm_120.
# backward_slots is the backward_keys kernel on the blocks' own slots: every tile is masked, which costs
# registers.
_TILES = {
    ("forward", 64): (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3)),
    ("forward", 128): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ("forward", 256): (Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2)),
    ("backward_queries", 64): (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3)),
    ("backward_queries", 128): (Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    ("backward_queries", 256): (Tiles(128, 32, 8, 1), Tiles(128, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("backward_keys", 64): (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
    ("backward_keys", 128): (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2)),
    ("backward_keys", 256): (Tiles(32, 32, 8, 1), Tiles(64, 64, 8, 1), Tiles(32, 32, 8, 1)),
    ("backward_slots", 64): (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(32, 64, 8, 2)),
    ("backward_slots", 128): (Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2)),
    ("backward_slots", 256): (Tiles(32, 32, 8, 1), Tiles(64, 64, 8, 1), Tiles(32, 32, 8, 1)),
}


def tiles(kernel: str, head_dim: int, itemsize: int, capability: int) -> Tiles:
    """Return the launch shape of a kernel.

    Args:
        kernel: "forward", "backward_queries", "backward_keys" or "backward_slots".
        head_dim: up to 256.
        itemsize: bytes per input element. float32 products run on ordinary cores in small tiles:
            exact, and slow.
        capability: compute capability times ten: 80, 90, 100 or 120.
    """
    if itemsize == 4:
        return Tiles(16, 16, 4, 1)
    widest = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return _TILES[kernel, widest][0 if 90 <= capability < 100 else 1 if 100 <= capability < 110 else 2]


def launch_constants(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time arguments that follow from the inputs alone."""
    # PRECISION matters for float32 inputs only
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"H": head_dim, "TILE_H": max(16, triton.next_power_of_2(head_dim)), "PRECISION": precision}


def _block_ranges(
    context_start_A: Tensor, anchor_A: Tensor, *, num_keys: int, tile_keys: int, block_size: int, window: int
) -> Tensor:
    """Return the blocks that see each tile of context rows.

    Tile [t0, t1): blocks with anchor > t0 and context_start < t1 see some of it, those with anchor >= t1 and
    context_start <= t0 see all of it. Both inputs ascend, so each set is a range. With anchors 3, 6, 9 of one
    sample and tiles of 4 rows: blocks [1, 3) see some of tile [4, 8), blocks [2, 3) see all of it.

    Returns:
        int32 [tiles, 4]: blocks [0]:[3] see some of the tile, blocks [1]:[2] all of it.
    """
    t0 = torch.arange(0, num_keys, tile_keys, device=anchor_A.device, dtype=anchor_A.dtype)
    t1 = (t0 + tile_keys).clamp(max=num_keys)
    first = torch.searchsorted(anchor_A, t0, right=True)
    full_first = torch.searchsorted(anchor_A, t1)
    last = torch.searchsorted(context_start_A, t1)
    full_last = torch.searchsorted(context_start_A, t0, right=True)
    if window > 0:
        # slot 0 sees rows > anchor - window, slot K - 1 rows > anchor + K - 1 - window
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
        out, num_rows = torch.empty_like(q), num_blocks * block_size * constants["R"]
        lse = torch.empty(groups, num_rows, device=q.device, dtype=torch.float32)
        shape = tiles("forward", head_dim, q.element_size(), _capability(q))
        forward_kernel[(triton.cdiv(num_rows, shape.rows), groups)](
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
        context_shape, slot_shape = (
            tiles(name, head_dim, q.element_size(), _capability(q))
            for name in ("backward_keys", "backward_slots")
        )
        ranges = _block_ranges(
            context_start,
            anchor,
            num_keys=k_ctx.shape[0],
            tile_keys=context_shape.keys,
            block_size=block_size,
            window=constants["WINDOW"],
        )
        gradients = []
        for own, shape, k, v in ((False, context_shape, k_ctx, v_ctx), (True, slot_shape, k_blk, v_blk)):
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
    """Return the compute capability times ten; the interpreter counts as 90."""
    if not x.is_cuda:
        return 90
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
    """Compute `block_attention.block_attention` on CUDA, in float32, bfloat16 or float16.

    A device-side assertion, which the host does not wait for, checks that `context_start_A`
    and `anchor_A` ascend.
    """
    scale = q_AKNH.shape[-1] ** -0.5 if scale is None else scale
    assert scale > 0 and (sliding_window is None or sliding_window > 0), (scale, sliding_window)
    assert q_AKNH.element_size() <= 4 and q_AKNH.is_floating_point(), q_AKNH.dtype
    tensors = [x.contiguous() for x in (q_AKNH, k_ctx_TGH, v_ctx_TGH, k_blk_AKGH, v_blk_AKGH)]
    context_start = context_start_A.to(torch.int32).contiguous()
    anchor = anchor_A.to(torch.int32).contiguous()
    if len(anchor) == 0:
        # empty, and differentiable in all five tensors
        return q_AKNH + sum(x.sum() for x in tensors[1:])
    ascending = (anchor.diff() >= 0).all() & (context_start.diff() >= 0).all()
    valid = ascending & (context_start <= anchor).all()
    torch._assert_async(valid, "context_start_A and anchor_A must ascend, context_start_A <= anchor_A")
    return _BlockAttention.apply(*tensors, context_start, anchor, sliding_window or 0, scale)
