"""Cases that compare the Triton kernels with float64; `test_triton.py` runs them in a process that it starts.

Without a GPU they need TRITON_INTERPRET=1, which must be set before a kernel is defined. Sizes are small and
no multiple of a tile: in the interpreter float32 tiles are 32 x 32 (rows x keys), float16 tiles 128 x 64. The
interpreter cannot multiply bfloat16 matrices, so attention is tested in float16 instead.
"""

import pytest
import torch

from dflash_core.kernels import block_attention_triton, linear_cross_entropy_triton
from dflash_core.kernels.block_attention import block_attention_reference
from dflash_core.kernels.linear_cross_entropy import VocabularyLoss, linear_cross_entropy_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "q", "k_ctx", "v_ctx", "k_blk", "v_blk")


@pytest.fixture(autouse=True)
def larger_tiles_in_the_interpreter(monkeypatch):
    """Use large float32 tiles in the interpreter, whose time grows with the number of tiles."""
    if DEVICE == "cpu":
        real = block_attention_triton.tiles
        large = block_attention_triton.Tiles(32, 32, 4, 1)
        monkeypatch.setattr(block_attention_triton, "tiles", lambda *a: large if a[2] == 4 else real(*a))


def attention_inputs(context_start, anchor, *, K, N, G, H, T, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = len(anchor)
    shapes = [(A, K, N, H), (T, G, H), (T, G, H), (A, K, G, H), (A, K, G, H)]
    tensors = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    rows = {"context_start_A": context_start, "anchor_A": anchor}
    rows = {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in rows.items()}
    return tensors, rows, torch.randn(shapes[0], generator=generator).to(DEVICE, dtype)


def run_attention(function, tensors, rows, dout, **options):
    """Return the output and the five gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, **rows, **options)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def check_attention(tensors, rows, dout, tolerance, **options):
    """Compare the kernels with the float64 reference; return their output and gradients."""
    actual = run_attention(block_attention_triton.block_attention, tensors, rows, dout, **options)
    double = [x.double() for x in tensors]
    expected = run_attention(block_attention_reference, double, rows, dout.double(), **options)
    for name, x, y in zip(NAMES, actual, expected):
        assert x.dtype == tensors[0].dtype
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    return actual


def case(context_start, anchor, **sizes):
    return {"context_start": context_start, "anchor": anchor, **sizes}


ATTENTION_CASES = {
    # blocks of 15 rows straddle tiles of 32, H is not a power of two, an empty context, equal anchors
    "straddling": case([0, 0, 0, 10, 10, 33], [0, 7, 7, 10, 20, 33], K=5, N=6, G=2, H=20, T=35),
    "one block, no context": case([0], [0], K=4, N=2, G=1, H=16, T=3),
    "one block, no row at all": case([0], [0], K=4, N=2, G=1, H=16, T=0),
    # one anchor per sample: 8 samples share a tile, each row sees at most 9 rows
    "many samples": case(
        [9 * i for i in range(12)], [9 * i + i % 10 for i in range(12)], K=4, N=1, G=1, H=16, T=109
    ),
    # the longest block: its 32 slots of two heads are one tile of keys and two tiles of queries
    "blocks of 32": case([0, 0, 30], [5, 20, 41], K=32, N=2, G=1, H=64, T=43),
    # an unmasked middle, masked ends, a tile of context rows shared by two samples
    "long": case([0] * 4 + [80] * 2, [3, 50, 68, 79, 81, 100], K=8, N=4, G=2, H=32, T=100),
}


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_values_and_gradients(name):
    tensors, rows, dout = attention_inputs(**ATTENTION_CASES[name])
    check_attention(tensors, rows, dout, 2e-6)


@pytest.mark.parametrize("window", [9, 40])
def test_attention_sliding_window(window):
    tensors, rows, dout = attention_inputs(**ATTENTION_CASES["long"])
    check_attention(tensors, rows, dout, 2e-6, sliding_window=window)


def test_attention_scale_and_half_precision():
    tensors, rows, dout = attention_inputs(**ATTENTION_CASES["long"], dtype=torch.float16)
    check_attention(tensors, rows, dout, 4e-3, scale=0.3)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not multiply bfloat16 matrices")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention_bfloat16_at_full_head_sizes(head_dim):
    sizes = ATTENTION_CASES["long"] | {"K": 16, "N": 8, "G": 2, "H": head_dim}
    tensors, rows, dout = attention_inputs(**sizes, dtype=torch.bfloat16)
    check_attention(tensors, rows, dout, 6e-2)


def test_attention_zero_weight_blocks_and_repeatability():
    """A zero output gradient gives exact zeros; a second run gives the same bits."""
    tensors, rows, dout = attention_inputs(**ATTENTION_CASES["straddling"])
    dout[[0, 3]] = 0
    first = check_attention(tensors, rows, dout, 2e-6)
    gradients = dict(zip(NAMES, first))
    for name in ("q", "k_blk", "v_blk"):
        assert (gradients[name][[0, 3]] == 0).all()
        assert (gradients[name][1] != 0).any()
    # rows that no block sees
    assert (gradients["k_ctx"][33:] == 0).all()
    again = run_attention(block_attention_triton.block_attention, tensors, rows, dout)
    assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_attention_ignores_invisible_keys():
    """Changes at the anchor's row or later, in another sample or in another block change nothing."""
    tensors, rows, dout = attention_inputs(**ATTENTION_CASES["straddling"])
    before = block_attention_triton.block_attention(*tensors, **rows)
    q, k_ctx, v_ctx, k_blk, v_blk = (x.clone() for x in tensors)
    # the sample of blocks 0, 1, 2 ends at row 10; their anchors are 0, 7, 7
    k_ctx[7:] += 100
    v_ctx[7:] += 100
    k_blk[2] += 100
    after = block_attention_triton.block_attention(q, k_ctx, v_ctx, k_blk, v_blk, **rows)
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])
    assert not torch.equal(before[4], after[4])


def test_attention_without_blocks_is_empty_and_differentiable():
    tensors, rows, dout = attention_inputs(context_start=[], anchor=[], K=4, N=2, G=1, H=16, T=3)
    out, *gradients = run_attention(block_attention_triton.block_attention, tensors, rows, dout)
    assert out.shape == (0, 4, 2, 16)
    assert all((g == 0).all() and g.shape == x.shape for g, x in zip(gradients, tensors))


def triton_loss(hidden, head, labels, soft_target=None):
    loss = linear_cross_entropy_triton.linear_cross_entropy
    return VocabularyLoss(*loss(hidden, head, labels, soft_target_PD=soft_target))


def loss_inputs(P, D, V, *, soft, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(P, D, generator=generator), torch.randn(V, D, generator=generator)
    hidden, head = hidden.to(DEVICE, dtype), head.to(DEVICE, dtype)
    labels = torch.randint(V, (P,), generator=generator).to(DEVICE)
    top = (hidden.double() @ head.double().T).argmax(dim=-1)
    labels[::2] = top[::2]
    weights = torch.rand(P, generator=generator).to(DEVICE)
    weights[1::3] = 0
    soft_target = torch.randn(P, D, generator=generator).to(DEVICE, dtype) if soft else None
    return hidden, head, labels, weights, soft_target


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "soft target"])
@pytest.mark.parametrize(
    ("P", "V", "rows", "dtype", "loss_tolerance", "gradient_tolerance"),
    [
        # V = 2 tiles of 2,048 and 907 words; chunks of 3, 3, 1
        (7, 5003, 3, torch.float32, 2e-6, 1e-5),
        # whole tiles
        (4, 4096, 4, torch.float32, 2e-6, 1e-5),
        # a vocabulary smaller than one tile
        (5, 37, 2, torch.float32, 2e-6, 1e-5),
        # gradient rounded to bfloat16: 3 decimal digits
        (5, 3001, 2, torch.bfloat16, 2e-6, 1e-2),
        (5, 3001, 2, torch.float16, 2e-6, 1e-3),
    ],
)
def test_loss_values_and_gradients(monkeypatch, P, V, rows, dtype, loss_tolerance, gradient_tolerance, soft):
    monkeypatch.setattr(linear_cross_entropy_triton, "chunk_rows", lambda n, soft: min(n, rows))
    hidden, head, labels, weights, soft_target = loss_inputs(P, 16, V, soft=soft, dtype=dtype)
    leaf, double_leaf = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    actual = triton_loss(leaf, head, labels, soft_target)
    (actual.loss_P * weights).sum().backward()
    target = None if soft_target is None else soft_target.double()
    expected = linear_cross_entropy_reference(double_leaf, head.double(), labels, soft_target_PD=target)
    (expected.loss_P * weights.double()).sum().backward()
    for x, y in ((actual.loss_P, expected.loss_P), (actual.log_prob_P, expected.log_prob_P)):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=loss_tolerance, atol=loss_tolerance)
    assert actual.correct_P.dtype == torch.bool
    assert torch.equal(actual.correct_P, expected.correct_P)
    assert actual.correct_P.any()
    assert not actual.correct_P.all()
    scale = double_leaf.grad.abs().max().item()
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.double(), double_leaf.grad, rtol=0, atol=gradient_tolerance * scale)
    assert (leaf.grad[1::3] == 0).all()
    assert (leaf.grad[0] != 0).any()


def test_loss_worked_numbers():
    """Hidden 1, head log(1), log(2), log(5): probabilities 1/8, 2/8, 5/8. du/dlogit = p - onehot."""
    head = torch.tensor([[1.0], [2.0], [5.0]], device=DEVICE).log()
    hidden = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    labels = torch.tensor([1, 2], device=DEVICE)
    result = triton_loss(hidden, head, labels)
    torch.testing.assert_close(result.loss_P.cpu(), torch.tensor([4.0, 1.6]).log())
    assert result.correct_P.tolist() == [False, True]
    (result.loss_P * torch.tensor([1.0, 0.0], device=DEVICE)).sum().backward()
    slope = head[:, 0].cpu() @ torch.tensor([0.125, 0.25 - 1, 0.625])
    torch.testing.assert_close(hidden.grad.cpu(), torch.tensor([[slope.item()], [0.0]]))


def test_loss_ties_and_extremes():
    """The lowest id wins a tie, across lanes and tiles; logits of 1e4 neither overflow nor lose the label."""
    head = torch.zeros(5000, 1, device=DEVICE)
    head[[17, 2065, 4999]] = 1.0
    hidden = torch.tensor([[1.0], [1.0], [1e4]], device=DEVICE, requires_grad=True)
    labels = torch.tensor([17, 2065, 0], device=DEVICE)
    result = triton_loss(hidden, head, labels)
    assert result.correct_P.tolist() == [True, False, False]
    expected = 1e4 + torch.tensor(3.0).log().item()
    torch.testing.assert_close(result.loss_P[2].item(), expected, rtol=1e-6, atol=0)
    result.loss_P.sum().backward()
    torch.testing.assert_close(hidden.grad[2].item(), 1.0)


def test_loss_without_gradient_or_positions():
    hidden, head, labels, _, _ = loss_inputs(4, 16, 100, soft=False, dtype=torch.float32)
    with_gradient = triton_loss(hidden.clone().requires_grad_(), head, labels)
    with torch.no_grad():
        without = triton_loss(hidden.requires_grad_(), head, labels)
    assert not without.loss_P.requires_grad
    assert not with_gradient.log_prob_P.requires_grad
    assert torch.equal(with_gradient.loss_P.detach(), without.loss_P)
    empty = triton_loss(hidden[:0], head, labels[:0])
    assert [len(x) for x in empty] == [0, 0, 0]
    assert empty.correct_P.dtype == torch.bool
    empty.loss_P.sum().backward()
    assert (hidden.grad == 0).all()
