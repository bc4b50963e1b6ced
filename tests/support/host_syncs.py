"""Operations that make the host wait for a device, counted without one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Their result's size or value is needed on the host: nonzero and masks as indices; item, tolist and bool().
SYNCING = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
}


class HostSyncs(TorchDispatchMode):
    """Collects the names of such operations in `found` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func is torch.ops.aten.index.Tensor else ()
        has_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if func in SYNCING or has_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
