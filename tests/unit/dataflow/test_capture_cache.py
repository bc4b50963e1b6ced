"""Files of the cache on disk that are damaged, or hold something else, are captured again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_core.dataflow.capture_cache import CaptureCache
from dflash_core.microbatch import FeatureSpec

CPU = torch.device("cpu")
SPEC = FeatureSpec(
    hidden_width=2, hidden_dtype=torch.float32, has_labels=True, last_width=0, last_dtype=torch.float32
)


def test_a_damaged_group_is_captured_again(tmp_path: Path) -> None:
    """One group of samples of 2 and 3 tokens, read at its second sample."""
    states, labels = torch.arange(10.0).view(5, 2), torch.arange(5)
    captured = 0

    def run(*rows: Any) -> SimpleNamespace:
        nonlocal captured
        captured += 1
        return SimpleNamespace(tensors=lambda: [states, labels])

    cache: Any = object.__new__(CaptureCache)
    cache.spec, cache.directory, cache._run = SPEC, tmp_path, run
    cache.capture = SimpleNamespace(target=SimpleNamespace(device=CPU))
    cache.schedule = SimpleNamespace(rows=lambda epoch, group: (np.array([0, 1]), 0))
    cache.store = SimpleNamespace(lengths=np.array([2, 3]))

    def reads_after(damage: Any) -> int:
        """Return how often the group was captured for two reads after a damage."""
        before = captured
        damage()
        for _ in range(2):
            [[hidden, read_labels]] = cache._read(0, [(2, 5)])
            assert torch.equal(hidden, states[2:])
            assert torch.equal(read_labels, labels[2:])
        return captured - before

    path = tmp_path / "group-000000.safetensors"
    assert reads_after(lambda: None) == 1
    assert reads_after(lambda: None) == 0
    for size in (0, 5, 60):
        assert reads_after(lambda size=size: os.truncate(path, size)) == 1
    for wrong in ({"0": torch.zeros(4, 2), "1": torch.zeros(5)}, {"0": torch.zeros(5, 2)}):
        assert reads_after(lambda wrong=wrong: save_file(wrong, path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
