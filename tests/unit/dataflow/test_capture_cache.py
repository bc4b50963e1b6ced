"""Files of the cache on disk that are damaged are captured again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_core.dataflow.capture_cache import CaptureCache


@pytest.mark.parametrize("size", [0, 5, 60])
def test_a_truncated_group_is_captured_again(tmp_path: Path, size: int) -> None:
    """Rows 1 and 2 of a group of three."""
    captured = []

    def run(*rows: int) -> SimpleNamespace:
        captured.append(rows)
        return SimpleNamespace(tensors=lambda: [torch.arange(6.0).view(3, 2)])

    def read() -> list[list[float]]:
        [[part]] = cache._read(7, [(1, 3)])
        return part.tolist()

    cache = object.__new__(CaptureCache)
    cache.directory, cache._run = tmp_path, run
    cache.schedule = SimpleNamespace(rows=lambda plan, group: (plan, group))
    cache.capture = SimpleNamespace(target=SimpleNamespace(device="cpu"))
    expected = [[2.0, 3.0], [4.0, 5.0]]
    assert [read(), read()] == [expected, expected]
    assert captured == [(0, 7)]
    [file] = tmp_path.iterdir()
    os.truncate(file, size)
    assert [read(), read()] == [expected, expected]
    assert captured == [(0, 7), (0, 7)]
