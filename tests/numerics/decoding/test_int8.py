"""The drafter in int8: products by hand, and an output that no rounding of drafts can change."""

from __future__ import annotations

import pytest
import torch

from dflash_core.decoding.evaluate import evaluate
from dflash_core.decoding.int8 import Int8Drafter, Int8Linear, as_decoded, quantise
from dflash_core.decoding.sampling import Sampling
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS


def test_a_row_has_the_scale_of_its_largest_entry() -> None:
    rows = torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]])
    quantised, scales = quantise(rows)
    assert quantised.tolist() == [[127, -50, 0], [0, 0, 0]]
    torch.testing.assert_close(scales[0], torch.tensor([0.01]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_products_are_near_those_of_the_weight(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 96, generator=generator).to(dtype) for n in (80, num_rows))
    bias = torch.randn(80, generator=generator).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    ours = Int8Linear(weight, bias)(x.view(num_rows, 1, 96))
    assert ours.dtype == dtype
    assert ours.shape == (num_rows, 1, 80)
    assert float((ours[:, 0].double() - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_int8_drafts_leave_the_output_as_it_is(
    target: Target, drafter: DFlashDrafter, temperature: float
) -> None:
    narrow = as_decoded(drafter, target, "int8")
    sampling = Sampling(max_new_tokens=16, batch_size=3, temperature=temperature)
    evaluation = evaluate(target, narrow, PROMPTS, sampling)
    assert [len(g.token_ids) for g in evaluation.speculative.generations] == [16] * 5
    assert evaluation.lossless is (None if temperature else True)
    # A copy was made.
    assert as_decoded(drafter, target, "auto") is drafter
    assert isinstance(narrow, Int8Drafter)


def test_drafts_in_int8_are_nearly_those_in_float32(target: Target, drafter: DFlashDrafter) -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(40, 2 * target.width_D, generator=generator)
    narrow = as_decoded(drafter, target, "int8")
    with torch.no_grad():
        exact, ours = (each.project_context(features) for each in (drafter, narrow))
    assert float((ours - exact).norm() / exact.norm()) < 0.03


def test_int8_elsewhere_than_on_a_cpu_is_an_error(drafter: DFlashDrafter) -> None:
    with pytest.raises(UserError, match="evaluation.drafter_dtype: 'int8' is not allowed on meta.*auto"):
        Int8Drafter(drafter, torch.empty(512, 64, device="meta"))
