"""The drafter in int8, for decoding on a CPU, where drafting takes as long as reading its weights.

Policy: every matrix that drafts read becomes int8 with one scale per output channel, the lm_head that the
drafter shares with the target included: most of the bytes of a small drafter. Activations get one scale per
row as they come. The target verifies every draft with its own weights, so its output stays the same; rounding
moves drafts alone, and with them the acceptance length a little.

Shape letters: R rows, D input width, W output width, V vocabulary.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dflash_core.drafter.drafter import DFlashDrafter, Linear
from dflash_core.errors import UserError
from dflash_core.target.target import Target

LARGEST = 127
# Rows for which oneDNN lays a weight out; other numbers of rows work, too.
PACKED_ROWS = 8


def as_decoded(drafter: DFlashDrafter, target: Target, dtype: str) -> DFlashDrafter:
    """Return the drafter as it decodes with a target: in int8, or ("auto") in the target's compute dtype."""
    drafter = drafter.to(target.compute_dtype)
    return Int8Drafter(drafter, target.head_weight) if dtype == "int8" else drafter


class Int8Drafter(DFlashDrafter):
    """A drafter that can only draft: its linear maps and its `head` in int8.

    Args:
        drafter: in the dtype of its activations; it stays as it is.
        head_VD: the target's lm_head.

    Raises:
        UserError: not on a CPU whose torch multiplies int8.
    """

    def __init__(self, drafter: DFlashDrafter, head_VD: Tensor) -> None:
        nn.Module.__init__(self)
        device = head_VD.device.type
        if device != "cpu" or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
            place = "a torch without oneDNN" if device == "cpu" else device
            raise UserError(f"evaluation.drafter_dtype: 'int8' is not allowed on {place}; allowed: auto")
        self.shape, self._rotary = drafter.shape, {}
        for name, module in drafter.named_children():
            setattr(self, name, _in_int8(module))
        self.head = Int8Linear(head_VD)


class Int8Linear(nn.Module):
    """A linear map with an int8 weight, packed for oneDNN; results have the dtype of the input."""

    def __init__(self, weight_WD: Tensor, bias_W: Tensor | None = None) -> None:
        super().__init__()
        quantised_WD, scale_W1 = quantise(weight_WD.detach())
        self.packed = torch.ops.onednn.qlinear_prepack(quantised_WD, [PACKED_ROWS, weight_WD.shape[1]])
        self.scale_W = scale_W1.flatten().contiguous()
        self.zero_W = torch.zeros(len(weight_WD), dtype=torch.int32)
        self.bias_W = None if bias_W is None else bias_W.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        rows_RD, scale_R1 = quantise(x.reshape(-1, x.shape[-1]))
        # The operator that torch's compiler emits for int8; it takes one scale for all rows, so 1 here.
        out_RW = torch.ops.onednn.qlinear_pointwise(
            *(rows_RD, 1.0, 0, self.packed, self.scale_W, self.zero_W, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        out_RW = out_RW * scale_R1
        if self.bias_W is not None:
            out_RW = out_RW + self.bias_W
        return out_RW.to(x.dtype).view(*x.shape[:-1], -1)


def quantise(rows_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [R, D] and float32 scales [R, 1] whose products are nearest to the rows."""
    wide_RD = rows_RD.float()
    # A row of zeros has no scale of its own.
    scale_R1 = (wide_RD.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=1e-30)
    return (wide_RD / scale_R1).round().to(torch.int8), scale_R1


def _in_int8(module: nn.Module) -> nn.Module:
    """Return a copy whose linear maps are in int8."""
    if isinstance(module, Linear):
        return Int8Linear(module.weight, module.bias)
    converted = copy.deepcopy(module)
    for name, child in module.named_children():
        setattr(converted, name, _in_int8(child))
    return converted
