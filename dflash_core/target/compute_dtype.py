"""The dtype in which a device computes where no setting names one.

Policy: bfloat16 where the device has units for it, else float32. Only some CPUs have them (AMX and
AVX512-BF16 on x86, the bf16 extension on ARM); on others bfloat16 is several times slower than float32.

Guarantee: the answer follows from what the device is, never from how busy it is, so that a run, its
resumption and its comparisons agree. It is printed together with its reason.
"""

from __future__ import annotations

import functools

import torch

# The names under which torch reports bfloat16 units of a CPU.
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")


@functools.lru_cache(maxsize=4)
def pick_compute_dtype(device: str = "cpu") -> torch.dtype:
    """Return bfloat16 where this device has units for it, else float32, and print the choice."""
    if torch.device(device).type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
        reason = torch.cuda.get_device_name(device)
    else:
        units = cpu_bf16_units()
        has_units = bool(units)
        reason = f"this CPU has {', '.join(units)}" if units else "this CPU has no bfloat16 units"
    chosen = torch.bfloat16 if has_units else torch.float32
    print(f"compute dtype: {dtype_name(chosen)} ({reason})", flush=True)
    return chosen


def cpu_bf16_units() -> tuple[str, ...]:
    """Return the bfloat16 units of this machine's CPU, by the names of `BF16_UNITS`."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return tuple(name for name in BF16_UNITS if capabilities.get(name))
    # Older releases of torch report those of x86 only; every CPU with AMX tiles multiplies bfloat16 in them.
    known = {
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    return tuple(name for name, is_there in known.items() if is_there)


def resolve_dtype(name: str | torch.dtype, device: str = "cpu") -> torch.dtype:
    """Return a dtype setting ("auto", "bfloat16", "float32") as a torch dtype."""
    if isinstance(name, torch.dtype):
        return name
    return pick_compute_dtype(str(device)) if name == "auto" else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as settings and files have it: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
