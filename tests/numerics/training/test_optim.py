"""Learning rate by step, step gradients, clipping: catches schedules that shift and means of means."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dflash_core.config import OptimizerConfig
from dflash_core.training.optim import Gradients, build_optimizer, learning_rate


def rates(total: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total + 1)]


def test_warmup_rises_by_equal_steps_and_never_starts_at_zero() -> None:
    assert rates(100, warmup_share=0.04)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_is_halfway_in_the_middle_and_ends_at_the_planned_step() -> None:
    by_step = rates(104, warmup_share=4 / 104)
    assert by_step[4] == 1.0
    assert by_step[54] == pytest.approx(0.5)
    assert by_step[104] == pytest.approx(0.0, abs=1e-12)
    assert rates(104, warmup_share=0.0, min_lr_share=0.1)[104] == pytest.approx(0.1)


def test_wsd_holds_then_falls_linearly() -> None:
    by_step = rates(100, schedule="wsd", warmup_share=0.0, decay_share=0.2)
    assert by_step[0] == by_step[79] == by_step[80] == 1.0
    assert by_step[90] == pytest.approx(0.5)
    assert by_step[95] == pytest.approx(0.25)
    assert by_step[100] == 0.0


def test_constant_and_no_warmup() -> None:
    assert set(rates(10, schedule="constant", warmup_share=0.0)) == {1.0}


def test_a_resume_at_step_3000_needs_no_scheduler_state() -> None:
    config = OptimizerConfig(lr=6e-4)
    uninterrupted = [learning_rate(step, 5000, config) for step in range(5000)]
    assert learning_rate(3000, 5000, config) == uninterrupted[3000] < config.lr


def test_gradients_are_sums_divided_once() -> None:
    """Samples of 10 and 100 supervised tokens give the same gradient in one microbatch and in two."""
    torch.manual_seed(0)
    x, y = torch.randn(110, 3), torch.randn(110)
    results = []
    for cuts in ([(0, 110)], [(0, 10), (10, 110)]):
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        gradients = Gradients(model.parameters())
        for first, end in cuts:
            ((model(x[first:end])[:, 0] - y[first:end]) ** 2).sum().backward()
        gradients.reduce(None)
        norm = gradients.normalise(110.0, clip_norm=1e9)
        assert norm == pytest.approx(float(model.weight.grad.norm()))
        results.append(model.weight.grad.clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)
    expected = (2 * (x.sum(1) - y)[:, None] * x).mean(0)
    torch.testing.assert_close(results[0][0], expected)


def test_clipping_scales_to_the_limit_and_reports_the_norm_before() -> None:
    p = nn.Parameter(torch.zeros(2))
    gradients = Gradients([p])
    p.grad.copy_(torch.tensor([6.0, 8.0]))  # divided by weight 2: norm 5
    assert float(gradients.normalise(2.0, clip_norm=1.0)) == pytest.approx(5.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    p.grad.copy_(torch.tensor([0.3, 0.4]))
    gradients.normalise(1.0, clip_norm=1.0)
    torch.testing.assert_close(p.grad, torch.tensor([0.3, 0.4]))


def test_zeroing_keeps_the_gradient_in_the_flat_buffer() -> None:
    p = nn.Parameter(torch.ones(3))
    gradients = Gradients([p])
    (p * 2).sum().backward()
    assert gradients.flat.tolist() == [2, 2, 2]
    gradients.zero()
    assert p.grad.tolist() == [0, 0, 0]
    p.sum().backward()
    assert gradients.flat.tolist() == [1, 1, 1]


def test_weight_decay_reaches_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, bias=False))
    nn.init.ones_(model[0].weight)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), torch.full((2, 2), 0.95))  # 1 - 0.1 * 0.5
    assert model[1].weight.tolist() == [1, 1]
