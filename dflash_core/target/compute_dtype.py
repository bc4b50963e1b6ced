"""TODO."""

from __future__ import annotations

import functools
import time

import torch


@functools.lru_cache(maxsize=4)
def pick_compute_dtype(device: str = "cpu") -> torch.dtype:
    """bfloat16 where this device multiplies matrices faster in it than in float32; printed with its reason.

    On CPU a probe of well under a second decides, in this process, once: only some CPUs have bfloat16 units
    (AMX, AVX512-BF16), and on others bfloat16 is several times slower than float32.
    """
    if torch.device(device).type == "cuda":
        chosen = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
        print(f"compute dtype: {_short(chosen)} ({torch.cuda.get_device_name(device)})", flush=True)
        return chosen
    speed = {dtype: _matmul_gflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    chosen = torch.bfloat16 if speed[torch.bfloat16] > 1.1 * speed[torch.float32] else torch.float32
    figures = ", ".join(f"{_short(dtype)} {value:.0f} GFLOP/s" for dtype, value in speed.items())
    print(f"compute dtype: {_short(chosen)} (probe on this CPU: {figures})", flush=True)
    return chosen


def resolve_dtype(name: str | torch.dtype, device: str = "cpu") -> torch.dtype:
    """A dtype setting ("auto", "bfloat16", "float32") as a torch dtype."""
    if isinstance(name, torch.dtype):
        return name
    return pick_compute_dtype(str(device)) if name == "auto" else getattr(torch, name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _matmul_gflops(dtype: torch.dtype, rows: int = 512, width: int = 768, seconds: float = 0.2) -> float:
    """Best of the matrix products that fit into `seconds`."""
    x, w = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    torch.nn.functional.linear(x, w)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * width * width / best / 1e9
