"""Vocabulary loss on CPU: tiles compared with full logits, values and gradients, in float64."""

import math

import pytest
import torch

from dflash_core.kernels import linear_cross_entropy as module
from dflash_core.kernels.linear_cross_entropy import (
    linear_argmax,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)


def inputs(positions=37, vocabulary=101, width=12, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(positions + vocabulary)

    def normal(*size):
        return (torch.randn(*size, generator=generator, dtype=torch.float64) * scale).to(dtype)

    labels = torch.randint(vocabulary, (positions,), generator=generator)
    args = normal(positions, width).requires_grad_(), normal(vocabulary, width), labels
    return args, normal(positions, width)


def value_and_gradient(function, args, soft_target):
    result = function(*args, soft_target_PD=soft_target)
    weight_P = torch.linspace(-1, 2, len(result.loss_P), dtype=result.loss_P.dtype)
    (grad,) = torch.autograd.grad((weight_P * result.loss_P).sum(), args[0])
    return result, grad


@pytest.fixture(params=[(8, 16), (1024, 2048), (64, 7)], ids=["small tiles", "one tile", "narrow tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(module, "TILE_POSITIONS", request.param[0])
    monkeypatch.setattr(module, "TILE_VOCABULARY", request.param[1])


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "kl"])
@pytest.mark.parametrize("size", [(37, 101), (1, 1), (16, 32), (3, 2), (0, 9)], ids=str)
def test_tiles_equal_full_logits(tiles, size, soft):
    args, soft_target = inputs(*size)
    soft_target = soft_target if soft else None
    (actual, grad), (expected, expected_grad) = (
        value_and_gradient(f, args, soft_target)
        for f in (linear_cross_entropy, linear_cross_entropy_reference)
    )
    torch.testing.assert_close(actual.loss_P, expected.loss_P, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(actual.log_prob_P, expected.log_prob_P, rtol=1e-11, atol=1e-12)
    assert torch.equal(actual.correct_P, expected.correct_P)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12)


def test_by_hand():
    """Logits 0, ln 2, 0: probabilities 1/4, 1/2, 1/4. Label 1: loss ln 2, gradients 1/4, -1/2, 1/4."""
    hidden = torch.tensor([[1.0]], requires_grad=True)
    head = torch.tensor([[0.0], [math.log(2)], [0.0]])
    loss, log_prob, correct = linear_cross_entropy(hidden, head, torch.tensor([1]))
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert log_prob.item() == pytest.approx(-math.log(2), rel=1e-6)
    assert correct.item()
    loss.sum().backward()
    assert hidden.grad.item() == pytest.approx(-0.5 * math.log(2), rel=1e-6)


def test_kl_of_the_same_logits_is_zero_and_so_is_its_gradient():
    (hidden, head, labels), _ = inputs()
    result, grad = value_and_gradient(linear_cross_entropy, (hidden, head, labels), hidden.detach().clone())
    torch.testing.assert_close(result.loss_P.detach(), torch.zeros(37).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-12)


def test_zero_weight_is_an_exact_zero():
    args, _ = inputs(dtype=torch.float32)
    loss_P = linear_cross_entropy(*args).loss_P
    weight_P = torch.ones(37)
    weight_P[[0, 5]] = 0
    (grad,) = torch.autograd.grad((weight_P * loss_P).sum(), args[0])
    assert not grad[[0, 5]].any()
    assert grad[1].any()


def test_the_lowest_id_wins_a_tie(tiles):
    """Logits 0 2 1 2 2: the argmax is id 1, whichever tiles hold the others."""
    hidden, head = torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0], [2.0], [2.0]])
    assert linear_argmax(hidden, head).tolist() == [1]
    for label, correct in ((1, True), (3, False), (4, False)):
        for function in (linear_cross_entropy, linear_cross_entropy_reference):
            assert function(hidden, head, torch.tensor([label])).correct_P.tolist() == [correct]


def test_large_logits_stay_finite(tiles):
    """Logits up to 1e4: a label far below the largest logit costs their difference, not infinity."""
    hidden = torch.tensor([[100.0]], requires_grad=True)
    head = torch.tensor([[100.0], [-100.0], [99.0]])
    loss_P = linear_cross_entropy(hidden, head, torch.tensor([1])).loss_P
    assert loss_P.item() == pytest.approx(20_000)
    loss_P.sum().backward()
    assert hidden.grad.item() == pytest.approx(200)


def test_float32_within_1e_5(tiles):
    args, soft_target = inputs(200, 3000, 64, scale=0.5)
    narrow = [x.detach().float() if x.is_floating_point() else x for x in args]
    narrow[0].requires_grad_()
    for soft, narrow_soft in ((None, None), (soft_target, soft_target.float())):
        expected, expected_grad = value_and_gradient(linear_cross_entropy_reference, args, soft)
        actual, grad = value_and_gradient(linear_cross_entropy, narrow, narrow_soft)
        torch.testing.assert_close(actual.loss_P.double(), expected.loss_P, rtol=1e-5, atol=1e-5)
        assert (grad - expected_grad).abs().max() <= 1e-5 * expected_grad.abs().max()


def test_bfloat16_inputs(tiles):
    args, _ = inputs(50, 300, 32, dtype=torch.bfloat16)
    actual, grad = value_and_gradient(linear_cross_entropy, args, None)
    wide = (args[0].detach().double().requires_grad_(), args[1].double(), args[2])
    expected, expected_grad = value_and_gradient(linear_cross_entropy_reference, wide, None)
    assert actual.loss_P.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(actual.loss_P.double(), expected.loss_P, rtol=0.02, atol=0.02)
    assert (grad.double() - expected_grad).abs().max() <= 0.02 * expected_grad.abs().max()


def test_bfloat16_probabilities_stay_below_one():
    """Logit 16 + 1/32, which the product rounds to 16: the label's own logit is rounded too."""
    hidden = torch.ones(1, 2, dtype=torch.bfloat16)
    head = torch.tensor([[16.0, 1 / 32], [0.0, 0.0]], dtype=torch.bfloat16)
    loss, log_prob, correct = linear_cross_entropy(hidden, head, torch.tensor([0]))
    assert -1e-6 < log_prob.item() <= 0
    assert loss.item() == -log_prob.item()
    assert correct.item()


def test_head_is_frozen_and_evaluation_needs_no_gradient():
    (hidden, head, labels), _ = inputs()
    head.requires_grad_()
    linear_cross_entropy(hidden, head, labels).loss_P.sum().backward()
    assert head.grad is None
    assert not linear_cross_entropy(hidden.detach(), head, labels).loss_P.requires_grad


def test_argmax_equals_full_logits(tiles):
    (hidden, head, _), _ = inputs()
    assert torch.equal(linear_argmax(hidden, head), (hidden @ head.T).argmax(-1))
