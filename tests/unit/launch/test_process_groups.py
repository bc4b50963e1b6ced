"""Devices of a rank, and why a GPU that was asked for is not there."""

from __future__ import annotations

import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.errors import UserError
from dflash_core.launch.process_groups import pick_devices


def without_cuda(monkeypatch: pytest.MonkeyPatch, *, built: bool, error: Exception | None = None) -> str:
    """Return the message about training.device: cuda where torch has no usable CUDA."""

    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError) as raised:
        pick_devices(TrainingConfig(device="cuda"))
    return str(raised.value)


def test_a_missing_gpu_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is built without CUDA; allowed: auto, cpu" in without_cuda(monkeypatch, built=False)
    old = RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040)")
    message = without_cuda(monkeypatch, built=True, error=old)
    assert "machine: The NVIDIA driver on your system is too old (found version 11040); allowed" in message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "no device is visible (CUDA_VISIBLE_DEVICES='-1')" in without_cuda(monkeypatch, built=True)


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_devices(TrainingConfig()) == [torch.device("cpu")]
