"""`HostReads`: what a CUDA graph cannot capture, found on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
# Methods by which the host reads a tensor; inference mode hides their operators.
METHODS = ["tolist", "cpu", "numpy", "item", "__int__", "__bool__", "__float__", "__index__"]
# Operators with a result whose shape the host waits for.
SHAPING = {
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.repeat_interleave.Tensor,
    ATEN._unique2.default,
    ATEN.unique_consecutive.default,
}
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default}


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = operator in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])
        if is_mask or operator in SHAPING:
            self.found.append(str(operator))
        return operator(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield the names of what reads tensors on the host inside the block."""
    found: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return own(self, *args, **kwargs)

        return method

    with pytest.MonkeyPatch.context() as patch, _Operators(found):
        for name in METHODS:
            patch.setattr(torch.Tensor, name, counted(name))
        # transformers reads positions on the host, except while it is captured.
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield found
