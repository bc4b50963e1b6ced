"""A file of cached captures that is not what was captured is one message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_core.dataflow.capture_cache import CaptureCache
from dflash_core.errors import UserError
from dflash_core.microbatch import FeatureSpec

CPU = torch.device("cpu")
SPEC = FeatureSpec(
    hidden_width=4, hidden_dtype=torch.float32, has_labels=True, last_width=0, last_dtype=torch.float32
)


def cache_of_two_samples(directory: Path) -> Any:
    """Return a cache of one group, samples of 2 and 3 tokens, without a target."""
    cache: Any = object.__new__(CaptureCache)
    cache.spec, cache.directory = SPEC, directory
    cache.capture = SimpleNamespace(target=SimpleNamespace(device=CPU))
    cache.schedule = SimpleNamespace(rows=lambda epoch, group: (np.array([0, 1]), 0))
    cache.store = SimpleNamespace(lengths=np.array([2, 3]))
    return cache


def test_a_file_of_other_tensors_is_rejected(tmp_path: Path) -> None:
    path, cache = tmp_path / "group-000000.safetensors", cache_of_two_samples(tmp_path)
    save_file({"0": torch.zeros(5, 4), "1": torch.zeros(5, dtype=torch.int64)}, path)
    assert [t.shape[0] for t in cache._read(0, [(2, 5)])[0]] == [3, 3]
    for wrong in ({"0": torch.zeros(4, 4), "1": torch.zeros(5)}, {"0": torch.zeros(5, 4)}):
        save_file(wrong, path)
        with pytest.raises(UserError, match="damaged .*expected .*remove it to capture these samples again"):
            cache._read(0, [(2, 5)])
    path.write_bytes(b"x")
    with pytest.raises(UserError, match="damaged .*header"):
        cache._read(0, [(2, 5)])
