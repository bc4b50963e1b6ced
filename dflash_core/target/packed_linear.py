"""Linear maps of a few rows on a CPU: weights laid out once as oneDNN multiplies them fastest.

Why: the plain product of a few rows reads weights at half the speed of memory, because it reorders them in
each call. A packed weight is reordered once, and activation, product and residual join the same call, so a
verification of eight rows costs about what a step of one row costs.

Measured on AVX512: the bits of a row's result do not depend on how many rows are multiplied with it, up to 64
rows; in float32 from two rows on, so there a lone row runs twice.

Price: a second copy of each weight. Weights stay as they are where memory is short (`fits`), and where torch
lacks the kernels.

Shape letters: R rows, I and O input and output width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

# Packed copies may take this share of the memory that is available when they are made.
MEMORY_SHARE = 0.5
# More rows than this are no longer few: the plain product is as fast, and bits may depend on their number.
MAX_FEW_ROWS = 64
# Rows for which weights are laid out: with these, the order of the sums is the same for any number of rows.
_ROWS = {torch.bfloat16: 1, torch.float32: 8}


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Return True where this torch, on this processor, multiplies packed weights of a dtype correctly."""
    if dtype not in _ROWS or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 32, generator=generator).to(dtype) for n in (48, 3))
    try:
        product = PackedRows(weight).product(x)
    except (AttributeError, RuntimeError):
        # No such operator, or none for this processor.
        return False
    return torch.allclose(product.float(), (x.float() @ weight.float().T), atol=0.1, rtol=0.02)


def fits(weights: Iterable[Tensor]) -> bool:
    """Return True where copies of the weights fit into the memory that is available now."""
    needed = sum(weight.numel() * weight.element_size() for weight in weights)
    return needed <= MEMORY_SHARE * psutil.virtual_memory().available


def can_pack(weights: Sequence[Tensor]) -> bool:
    """Return True where weights of one dtype, on the CPU, can be packed and their copies fit."""
    return packs(weights[0].dtype) and fits(weights)


class FewRows(Protocol):
    """x @ weight.T + bias for a few rows [R, I], alone or joined with an elementwise step, [R, O]."""

    def product(self, x: Tensor) -> Tensor:
        """Return the product alone."""

    def silu(self, x: Tensor) -> Tensor:
        """Return silu of the product."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus `other` [R, O]."""

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product times `other` [R, O]."""


class PackedRows:
    """By oneDNN, with a packed copy of the weight.

    The operators are those that torch's compiler emits for frozen models.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        ops = torch.ops.mkldnn
        self._unary, self._binary = ops._linear_pointwise.default, ops._linear_pointwise.binary
        self._weight = ops._reorder_linear_weight(weight.contiguous(), _ROWS[weight.dtype])
        self._bias = bias

    def product(self, x: Tensor) -> Tensor:
        return self._unary(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        return self._unary(x, self._weight, self._bias, "swish", [], "")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self._weight, self._bias, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self._weight, self._bias, "mul")


class PlainRows:
    """By torch's own operators, with the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self.product(x))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self.product(x) + other

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self.product(x) * other
