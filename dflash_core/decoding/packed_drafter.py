"""The drafter as it drafts on a CPU: linear maps with packed weights (`target/packed_linear.py`).

Price: packing at the start of each decoding, since weights may have been trained since the last one: the time
of about one step, and a copy of the weights while it lasts.
"""

from __future__ import annotations

import copy

from torch import Tensor, dtype, nn

from dflash_core.drafter.drafter import DFlashDrafter, Linear
from dflash_core.target.packed_linear import MAX_FEW_ROWS, PackedRows, fits, packs


def packed_drafter(drafter: DFlashDrafter, compute_dtype: dtype) -> DFlashDrafter:
    """Return a drafter that computes the same with packed weights; the drafter itself where it cannot.

    Args:
        drafter: stays as it is; sharded ones and those on other devices are not packed.
        compute_dtype: of its activations.
    """
    weights = list(drafter.parameters())
    is_local = all(w.device.type == "cpu" and not hasattr(w, "full_tensor") for w in weights)
    if not (is_local and packs(compute_dtype) and fits(weights)):
        return drafter
    packed = _packed(drafter, compute_dtype)
    assert isinstance(packed, DFlashDrafter)
    return packed


class _PackedLinear(nn.Module):
    """A linear map: packed for few rows, as it is for many."""

    def __init__(self, linear: Linear, compute_dtype: dtype) -> None:
        super().__init__()
        self.linear = linear
        bias = None if linear.bias is None else linear.bias.detach().to(compute_dtype)
        self.rows = PackedRows(linear.weight.detach().to(compute_dtype), bias)

    def forward(self, x: Tensor) -> Tensor:
        rows_RD = x.reshape(-1, x.shape[-1])
        if len(rows_RD) > MAX_FEW_ROWS:
            return self.linear(x)
        return self.rows.product(rows_RD).view(*x.shape[:-1], self.linear.out_features)


def _packed(module: nn.Module, compute_dtype: dtype) -> nn.Module:
    """Return a module with the same parameters whose linear maps are packed."""
    if isinstance(module, Linear):
        return _PackedLinear(module, compute_dtype)
    changed = copy.copy(module)
    changed._modules = {
        name: None if child is None else _packed(child, compute_dtype)
        for name, child in module._modules.items()
    }
    return changed
