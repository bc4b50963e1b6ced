"""The compute dtype follows from what a device is, never from its speed."""

from __future__ import annotations

import pytest
import torch

from dflash_core.target import compute_dtype
from dflash_core.target.compute_dtype import cpu_bf16_units, dtype_name, pick_compute_dtype, resolve_dtype


@pytest.mark.parametrize(
    "capabilities, expected, reason",
    [
        ({"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16, "this CPU has amx_bf16, avx512_bf16"),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16, "this CPU has avx512_bf16"),
        ({"neon": True, "bf16": True}, torch.bfloat16, "this CPU has bf16"),
        ({"avx2": True, "avx512_f": True}, torch.float32, "this CPU has no bfloat16 units"),
    ],
)
def test_units_of_the_cpu_decide(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capabilities: dict[str, bool],
    expected: torch.dtype,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    pick_compute_dtype.cache_clear()
    try:
        assert resolve_dtype("auto", "cpu") is expected
        assert capsys.readouterr().out == f"compute dtype: {dtype_name(expected)} ({reason})\n"
    finally:
        pick_compute_dtype.cache_clear()


def test_an_older_torch_reports_the_units_of_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert cpu_bf16_units() == ("avx512_bf16",)


def test_a_named_dtype_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_dtype, "pick_compute_dtype", lambda device: pytest.fail("asked"))
    assert resolve_dtype("float32") is torch.float32
    assert resolve_dtype(torch.bfloat16) is torch.bfloat16
