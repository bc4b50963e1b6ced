"""Block attention on CPU: tiles compared with the dense mask, values and gradients, in float64."""

import pytest
import torch

from dflash_core.kernels import block_attention as module
from dflash_core.kernels.block_attention import block_attention, block_attention_reference

# starts of the blocks' samples, their anchors, and the number of context rows
CASES = {
    "one block": ([0], [5], 8),
    "empty context": ([0, 4], [0, 4], 8),
    "anchors 1 apart, pack boundary": ([0, 0, 0, 6, 6, 6], [3, 4, 5, 6, 7, 8], 12),
    "equal anchors": ([0, 0, 2], [2, 2, 3], 4),
    "far apart": ([0, 0, 0], [1, 90, 300], 301),
    "many in a row": ([0] * 20, list(range(3, 43, 2)), 50),
    "rows that no block sees": ([10, 20], [12, 21], 64),
    "no block": ([], [], 7),
}


def inputs(starts, anchors, rows, *, block_size=4, heads=6, kv_heads=2, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    num_blocks, context, slots = len(anchors), (rows, kv_heads, head_dim), (block_size, kv_heads, head_dim)
    shapes = [(num_blocks, block_size, heads, head_dim), context, context, *[(num_blocks, *slots)] * 2]
    tensors = [normal(*shape) for shape in shapes]
    index = {"context_start_A": starts, "anchor_A": anchors}
    return tensors, {name: torch.tensor(values, dtype=torch.int32) for name, values in index.items()}


def value_and_gradients(function, tensors, **kwargs):
    out = function(*tensors, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


def assert_all_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sliding_window", [None, 6])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiles_equal_the_dense_mask(case, sliding_window):
    tensors, where = inputs(*case)
    actual = value_and_gradients(block_attention, tensors, sliding_window=sliding_window, **where)
    expected = value_and_gradients(block_attention_reference, tensors, sliding_window=sliding_window, **where)
    assert_all_close(actual, expected)


@pytest.mark.parametrize("shape", [(4, 4, 16), (8, 1, 4), (3, 3, 10)], ids=["mha", "mqa", "odd"])
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_heads_and_block_sizes(shape, block_size):
    heads, kv_heads, head_dim = shape
    sizes = {"block_size": block_size, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    tensors, where = inputs(*CASES["anchors 1 apart, pack boundary"], **sizes)
    actual = value_and_gradients(block_attention, tensors, scale=0.7, **where)
    expected = value_and_gradients(block_attention_reference, tensors, scale=0.7, **where)
    assert_all_close(actual, expected)


def test_two_visible_keys_by_hand():
    """Scores ln 3 (context) and 0 (own slot): weights 3/4 and 1/4, values 1 and 5 -> 2."""
    q = torch.tensor([[[[1.0]]]])
    k_ctx, v_ctx = torch.tensor([[[3.0]]]).log(), torch.tensor([[[1.0]]])
    k_blk, v_blk = torch.tensor([[[[0.0]]]]), torch.tensor([[[[5.0]]]])
    where = {"context_start_A": torch.tensor([0]), "anchor_A": torch.tensor([1])}
    for function in (block_attention, block_attention_reference):
        out = function(q, k_ctx, v_ctx, k_blk, v_blk, **where)
        torch.testing.assert_close(out, torch.tensor([[[[2.0]]]]))


@pytest.mark.parametrize("tile", [(1, 1), (2, 4), (64, 1000)])
def test_tile_sizes_do_not_matter(tile, monkeypatch):
    tensors, where = inputs(*CASES["many in a row"])
    expected = value_and_gradients(block_attention, tensors, sliding_window=9, **where)
    monkeypatch.setattr(module, "TILE_BLOCKS", tile[0])
    monkeypatch.setattr(module, "TILE_SPREAD", tile[1])
    actual = value_and_gradients(block_attention, tensors, sliding_window=9, **where)
    assert_all_close(actual, expected)


def test_work_follows_the_visible_context():
    """Compare computed with visible scores: 64 anchors in each of 4 samples of 512; no window, and 64."""
    starts = [512 * (i // 64) for i in range(256)]
    anchors = [start + 8 * (i % 64) for i, start in enumerate(starts)]
    start_A, anchor_A = torch.tensor(starts), torch.tensor(anchors)
    for window in (None, 64):
        tiles = list(module._tiles(start_A, anchor_A, 8, window))
        computed = sum(t.num_scores for t in tiles)
        masks = [mask for t in tiles for mask in (t.hidden_left_Ml, t.hidden_right_Mr)]
        visible = computed - sum(int(mask.sum()) for mask in masks)
        context = sum(a - s if window is None else min(a - s, window) for s, a in zip(starts, anchors))
        assert visible <= 8 * (context + 8 * 256)
        # a dense mask would compute 15 and 60 times the visible scores
        assert computed < (1.5 if window is None else 3) * visible
    # eight blocks far into a sample: masks cover only the 7 x 8 rows between the anchors and 64 own slots
    (far,) = module._tiles(torch.zeros(8).int(), torch.arange(20_000, 20_064, 8), 8, None)
    assert (far.hidden_left_Ml.shape, far.hidden_right_Mr.shape) == ((64, 0), (64, 56 + 64))
    assert far.num_scores == 64 * (20_056 + 64)


def test_rows_that_no_block_sees_may_hold_anything():
    tensors, where = inputs(*CASES["rows that no block sees"])
    expected = value_and_gradients(block_attention, tensors, **where)
    with torch.no_grad():
        for x in tensors[1:3]:
            x[:10], x[12:20], x[21:] = torch.nan, torch.inf, torch.nan
    actual = value_and_gradients(block_attention, tensors, **where)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


def test_bfloat16_accumulates_in_float32():
    tensors, where = inputs(*CASES["many in a row"], dtype=torch.bfloat16)
    actual = value_and_gradients(block_attention, tensors, **where)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    for a, e in zip(actual, value_and_gradients(block_attention_reference, wide, **where)):
        assert a.dtype == torch.bfloat16
        assert (a.double() - e).abs().max() <= 0.02 * e.abs().max()


def test_calls_are_bit_equal():
    tensors, where = inputs(*CASES["many in a row"], dtype=torch.float32)
    first, second = (value_and_gradients(block_attention, tensors, **where) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
