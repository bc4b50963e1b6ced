"""Compile the Triton kernels ahead of time for chips that are not here, and check that they would launch.

    python -m benchmarks.kernels_aot           # one configuration per kernel and chip (Qwen3-8B shapes, bf16)
    python -m benchmarks.kernels_aot --grid    # head sizes, dtypes, block sizes, sliding window too
    python -m benchmarks.kernels_aot --grid --chips 90 120    # in parts

A successful compilation proves little: Triton builds kernels that need more shared memory than the chip
has, and ptxas spills registers without a warning. So each kernel's shared memory is compared with the
chip's limit per block, and the bytes spilled to the stack are read from the binary with the `cuobjdump`
that Triton ships.

Prints a table, then one line of JSON with the same figures. Exit code 1 when shared memory does not fit, or
when a configuration spills that must not: bf16 and fp16 up to head size 128, and the vocabulary loss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_core.kernels import block_attention_triton, linear_cross_entropy_triton

SHARED_LIMIT_KB = {80: 163, 90: 227, 100: 227, 120: 99}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# pointers to something else than the job's dtype
POINTERS = dict.fromkeys(("context_start_ptr", "anchor_ptr", "ranges_ptr"), "*i32")
POINTERS |= {"labels_ptr": "*i64", "correct_ptr": "*i8"}
POINTERS |= dict.fromkeys(
    ("lse_ptr", "delta_ptr", "logits_ptr", "target_ptr", "loss_ptr", "log_prob_ptr"), "*fp32"
)


class Job(NamedTuple):
    """One compilation. `label` describes `constants`."""

    # forward, backward_queries, backward_keys or row
    kernel: str
    label: str
    capability: int
    dtype: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    may_spill: bool


def attention_job(
    kernel: str,
    capability: int,
    *,
    head_dim=128,
    groups=8,
    heads_per_group=4,
    block_size=16,
    window=0,
    dtype="bf16",
    own=None,
) -> Job:
    """Return a kernel of block attention with the tiles that a launch on that chip would use."""
    torch_dtype = DTYPES[dtype]
    name = "backward_slots" if own else kernel
    shape = block_attention_triton.tiles(name, head_dim, torch_dtype.itemsize, capability)
    constants = {"G": groups, "R": heads_per_group, "K": block_size, "WINDOW": window}
    constants |= {"TILE_ROWS": shape.rows, "TILE_KEYS": shape.keys}
    constants |= block_attention_triton.launch_constants(head_dim, torch_dtype)
    label = f"H {head_dim} R {heads_per_group} K {block_size} W {window}"
    if own is not None:
        constants["OWN"] = own
        label += " slots" if own else " context"
    may_spill = dtype == "fp32" or head_dim > 128
    return Job(kernel, label, capability, dtype, constants, shape.num_warps, shape.num_stages, may_spill)


def row_job(capability: int, *, soft=False, gradient=True, dtype="bf16") -> Job:
    """Return the row kernel of the vocabulary loss."""
    constants = {"SOFT": soft, "GRADIENT": gradient, "TILE": linear_cross_entropy_triton.TILE_V}
    label = ("soft target" if soft else "labels") + (", gradient" if gradient else "")
    return Job("row", label, capability, dtype, constants, linear_cross_entropy_triton.NUM_WARPS, 1, False)


def default_jobs() -> list[Job]:
    """Return one configuration per kernel and chip."""
    jobs = []
    for capability in SHARED_LIMIT_KB:
        jobs += [attention_job(kernel, capability) for kernel in ("forward", "backward_queries")]
        jobs += [attention_job("backward_keys", capability, own=False), row_job(capability)]
    return jobs


def grid_jobs() -> list[Job]:
    """Return every variant that a run can use, each at least once on each chip."""
    jobs = default_jobs()
    shapes: list[dict[str, Any]] = [
        {"head_dim": 64, "groups": 3, "heads_per_group": 3, "block_size": 8},
        {"head_dim": 96, "block_size": 10},
        {"head_dim": 256, "groups": 4, "heads_per_group": 4, "block_size": 16},
        {"block_size": 32, "heads_per_group": 8},
        {"block_size": 4, "heads_per_group": 1},
        {"window": 2048},
        {"dtype": "fp16"},
        {"dtype": "fp32"},
    ]
    for capability in SHARED_LIMIT_KB:
        jobs.append(attention_job("backward_keys", capability, own=True))
        for shape in shapes:
            jobs += [attention_job(kernel, capability, **shape) for kernel in ("forward", "backward_queries")]
            owns = (False, True) if "head_dim" in shape else (False,)
            jobs += [attention_job("backward_keys", capability, own=own, **shape) for own in owns]
        jobs += [row_job(capability, soft=True), row_job(capability, gradient=False)]
        jobs += [row_job(capability, dtype=dtype) for dtype in ("fp16", "fp32")]
    return jobs


def compile_job(job: Job) -> dict[str, Any]:
    """Compile, and read registers, spilled bytes and shared memory of the binary."""
    module = linear_cross_entropy_triton if job.kernel == "row" else block_attention_triton
    kernel = getattr(module, f"{job.kernel}_kernel")
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in job.constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*" + job.dtype)
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        # arguments that a launch would find aligned
        if name.endswith(("_ptr", "_stride", "num_words")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, job.constants, attributes)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, "enable_fp_fusion": True}
    start = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    seconds = time.perf_counter() - start
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    result = {
        "kernel": job.kernel,
        "label": job.label,
        "capability": job.capability,
        "dtype": job.dtype,
        "tile": [job.constants.get("TILE_ROWS"), job.constants.get("TILE_KEYS")],
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
        "registers": counts["REG"],
        "spilled_bytes": counts["STACK"] + counts["LOCAL"],
        "shared_kb": compiled.metadata.shared / 1024,
        "shared_limit_kb": SHARED_LIMIT_KB[job.capability],
        "seconds": round(seconds, 1),
    }
    result["fits"] = result["shared_kb"] <= result["shared_limit_kb"]
    result["passed"] = result["fits"] and (job.may_spill or result["spilled_bytes"] == 0)
    return result


def run(jobs: list[Job], num_processes: int) -> list[dict[str, Any]]:
    """Compile all jobs and print one line per job, in order."""
    job_columns = f"{'configuration':<28}{'dtype':<6}{'tile':>10}{'warps':>6}{'stages':>7}"
    result_columns = f"{'registers':>10}{'spilled B':>10}{'shared KB':>10}{'limit':>6}{'s':>6}"
    print(f"{'chip':>6} {'kernel':<17}{job_columns}{result_columns}")
    results = []
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for r in pool.imap(compile_job, jobs):
            tile = "x".join(str(x) for x in r["tile"] if x)
            mark = "" if r["passed"] else "  FAILED"
            cells = f"{r['label']:<28}{r['dtype']:<6}{tile:>10}{r['num_warps']:>6}{r['num_stages']:>7}"
            cells += f"{r['registers']:>10}{r['spilled_bytes']:>10}"
            cells += f"{r['shared_kb']:>10.1f}{r['shared_limit_kb']:>6}{r['seconds']:>6}"
            print(f"sm_{r['capability']:<4}{r['kernel']:<17}{cells}{mark}", flush=True)
            results.append(r)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="the full grid, not one job per kernel and chip")
    chips = {"type": int, "nargs": "+", "default": list(SHARED_LIMIT_KB), "choices": SHARED_LIMIT_KB}
    parser.add_argument("--chips", **chips, metavar="CHIP", help="of 80, 90, 100, 120")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    start = time.perf_counter()
    jobs = grid_jobs() if options.grid else default_jobs()
    results = run([job for job in jobs if job.capability in options.chips], options.processes)
    passed = all(r["passed"] for r in results)
    summary = {"triton": triton.__version__, "passed": passed, "compiled": len(results)}
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps(summary | {"seconds": seconds, "results": results}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
