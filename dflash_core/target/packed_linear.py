"""Linear maps of a few rows on a CPU: weights laid out once as oneDNN multiplies them fastest.

Why: the plain product of a few rows reads weights at half the speed of memory, because it reorders them in
each call. A packed weight is reordered once, and activation, product and residual join the same call, so a
verification of eight rows costs about what a step of one row costs.

Guarantee: where a processor has the kernels (`packs`), the bits of a row's result do not depend on how many
rows are multiplied with it, up to 64 rows. In float32 that holds from two rows on, so a lone row runs twice.

Price: a second copy of each weight. Weights stay as they are where memory is short (`fits`), and where torch
lacks the kernels.

Shape letters: R rows, I and O input and output width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

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
        product = _Packed(weight, None)(x, "none")
    except (AttributeError, RuntimeError):
        # No such operator, or none for this processor.
        return False
    return torch.allclose(product.float(), (x.float() @ weight.float().T), atol=0.1, rtol=0.02)


def fits(weights: Iterable[Tensor]) -> bool:
    """Return True where copies of the weights fit into the memory that is available now."""
    needed = sum(weight.numel() * weight.element_size() for weight in weights)
    return needed <= MEMORY_SHARE * psutil.virtual_memory().available


class FewRows:
    """x @ weight.T + bias for a few rows [R, I], alone or joined with an elementwise step.

    Args:
        weight: [O, I], and bias [O] or None, on the CPU.
        pack: keep a packed copy of the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool) -> None:
        self.product: _Packed | _Plain = (_Packed if pack else _Plain)(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, [R, O]."""
        return self.product(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """Return silu of the product."""
        return self.product(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus `other` [R, O]."""
        return self.product.joined(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product times `other` [R, O]."""
        return self.product.joined(x, other, "mul")


class _Packed:
    """The product by oneDNN; the operators are those that torch's compiler emits for frozen models."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops = torch.ops.mkldnn
        self.unary, self.binary = ops._linear_pointwise.default, ops._linear_pointwise.binary
        self.weight = ops._reorder_linear_weight(weight.contiguous(), _ROWS[weight.dtype])
        self.bias = bias

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        if len(x) == 1 and x.dtype == torch.float32:
            return self(x.repeat(2, 1), activation)[:1]
        return self.unary(x, self.weight, self.bias, activation, [], "")

    def joined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return self.binary(x, other, self.weight, self.bias, operation)


class _Plain:
    """The same by torch's own operators."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return F.silu(product) if activation == "swish" else product

    def joined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        product = F.linear(x, self.weight, self.bias)
        return product + other if operation == "add" else product * other
