"""The dtype in which a device computes, chosen by a measurement where no setting names one.

Policy: bfloat16 where the device multiplies matrices faster in it than in float32, else float32. On a CUDA
device its capability decides. On CPU a probe decides: only some CPUs have bfloat16 units (AMX, AVX512-BF16),
and on others bfloat16 is several times slower than float32.

Guarantee: one answer per device and process, printed together with its reason.

Price: well under a second on CPU, once per process.
"""

from __future__ import annotations

import functools
import time

import torch


@functools.lru_cache(maxsize=4)
def pick_compute_dtype(device: str = "cpu") -> torch.dtype:
    """Return bfloat16 where this device is faster in it than in float32, and print the choice."""
    if torch.device(device).type == "cuda":
        chosen = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
        print(f"compute dtype: {dtype_name(chosen)} ({torch.cuda.get_device_name(device)})", flush=True)
        return chosen
    speed = {dtype: _matmul_gflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    chosen = torch.bfloat16 if speed[torch.bfloat16] > 1.1 * speed[torch.float32] else torch.float32
    figures = ", ".join(f"{dtype_name(dtype)} {value:.0f} GFLOP/s" for dtype, value in speed.items())
    print(f"compute dtype: {dtype_name(chosen)} (probe on this CPU: {figures})", flush=True)
    return chosen


def resolve_dtype(name: str | torch.dtype, device: str = "cpu") -> torch.dtype:
    """Return a dtype setting ("auto", "bfloat16", "float32") as a torch dtype."""
    if isinstance(name, torch.dtype):
        return name
    return pick_compute_dtype(str(device)) if name == "auto" else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as settings and files have it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _matmul_gflops(dtype: torch.dtype, rows: int = 512, width: int = 768, seconds: float = 0.2) -> float:
    """Return the best speed of the matrix products that fit into `seconds`."""
    x, w = torch.ones(rows, width, dtype=dtype), torch.ones(width, width, dtype=dtype)
    torch.nn.functional.linear(x, w)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return 2 * rows * width * width / best / 1e9
