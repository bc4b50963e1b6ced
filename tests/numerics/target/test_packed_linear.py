"""Products of few rows, packed and plain, against the formula."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import silu

from dflash_core.target.packed_linear import FewRows, PackedRows, PlainRows, fits, packs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 64])
def test_products_and_what_joins_them(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, other, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, 24), (num_rows, 40), (40, 24), (40,))
    )
    product = x.float() @ weight.float().T + (bias.float() if has_bias else 0)
    tolerance = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    kinds: list[Callable[..., FewRows]] = [PlainRows, *([PackedRows] if packs(dtype) else [])]
    for kind in kinds:
        few = kind(weight, bias if has_bias else None)
        torch.testing.assert_close(few.product(x).float(), product, **tolerance)
        torch.testing.assert_close(few.silu(x).float(), silu(product), **tolerance)
        torch.testing.assert_close(few.plus(x, other).float(), product + other.float(), **tolerance)
        torch.testing.assert_close(few.times(x, other).float(), product * other.float(), **tolerance)


def test_copies_have_to_fit_into_memory() -> None:
    assert fits([torch.zeros(10)])
    assert not fits([torch.zeros(1).expand(1 << 50)])


def test_a_dtype_without_kernels_is_not_packed() -> None:
    assert not packs(torch.float64)
