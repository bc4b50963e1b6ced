"""One training step of the drafter, forward and backward, against a dense mask and full logits.

    python -m benchmarks.drafter_step            # about 4 minutes on two cores
    python -m benchmarks.drafter_step --quick    # the two sides alone

Sizes of SmolLM2-135M: width 576, vocabulary 49,152, block size 8, three draft layers; 8 packed samples of 512
tokens, 64 anchors each, unless a row names other sizes. Every figure comes from its own process: seconds are
the best of the repeats; memory is the growth of the process's peak resident size over its size before the
step, so it excludes inputs, weights and the target's head. Compare ratios within one run; on a busy machine
those of the CPU seconds under OMP_NUM_THREADS=1. Prints a table, then one line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BASE = {"samples": 8, "length": 512, "anchors": 64, "layers": 3, "max_draft_slots": 16_384}


def make_inputs(samples: int, length: int, anchors: int, layers: int) -> tuple[Any, ...]:
    """Return a drafter, the target's embedding and head, and the tensors of one microbatch."""
    import torch

    from dflash_core.drafter.drafter import DFlashDrafter
    from dflash_core.drafter.shape import DrafterShape
    from dflash_core.objective.loss import TargetEnds

    shape = DrafterShape(
        hidden_size=576,
        intermediate_size=1536,
        num_layers=layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        block_size=8,
        mask_token_id=3,
        target_layer_ids=(1, 8, 14, 20, 27),
        num_target_layers=30,
        vocab_size=49_152,
        rope_theta=100_000.0,
    )
    generator = torch.Generator().manual_seed(0)
    num_tokens = samples * length
    features = torch.randn(num_tokens, 5 * 576, generator=generator)
    head = torch.randn(49_152, 576, generator=generator) * 0.1
    token_ids = torch.randint(17, 49_152, (num_tokens,), generator=generator)
    cu_seqlens = torch.arange(0, num_tokens + 1, length, dtype=torch.int32)
    drawn = [torch.randperm(length - 1, generator=generator)[:anchors].sort().values for _ in range(samples)]
    anchor_rows = torch.cat([rows + i * length for i, rows in enumerate(drawn)]).int()
    anchor_sample = torch.arange(samples, dtype=torch.int32).repeat_interleave(len(drawn[0]))
    mask = torch.ones(num_tokens, dtype=torch.uint8)
    inputs = (features, token_ids, mask, cu_seqlens, anchor_rows, anchor_sample)
    return DFlashDrafter(shape, generator), TargetEnds(head, head), inputs


def our_step(drafter: Any, ends: Any, inputs: tuple[Any, ...], max_draft_slots: int) -> float:
    import numpy as np
    import torch

    from dflash_core.config import ObjectiveConfig
    from dflash_core.microbatch import Features, Microbatch
    from dflash_core.objective.loss import LossSettings, microbatch_loss

    features, token_ids, loss_mask, cu_seqlens, anchors, anchor_sample = inputs
    microbatch = Microbatch(
        sample_rows=np.arange(len(cu_seqlens) - 1, dtype=np.int32),
        token_ids=token_ids.numpy(),
        loss_mask=loss_mask.numpy(),
        cu_seqlens=cu_seqlens.numpy(),
        width=0,
        anchors=anchors.numpy(),
        anchor_sample=anchor_sample.numpy(),
    )
    settings = LossSettings(ends, ObjectiveConfig(), 3, max_draft_slots, torch.device("cpu"))
    return microbatch_loss(drafter, microbatch, Features(features), settings, backward=True).loss()


def dense_step(drafter: Any, ends: Any, inputs: tuple[Any, ...], max_draft_slots: int) -> float:
    from benchmarks.dense_drafter import dense_hidden, dense_loss
    from dflash_core.config import ObjectiveConfig

    features, token_ids, loss_mask, *where = inputs
    weights = dict(drafter.named_parameters())
    hidden = dense_hidden(weights, drafter.shape, ends.embed_VD, features, token_ids, *where)
    losses = dense_loss(hidden, ends.head_VD, token_ids, loss_mask, *where, ObjectiveConfig())
    loss_sum, weight_sum, *_ = losses
    loss_sum.backward()
    return float(loss_sum.detach() / weight_sum)


def resident_mb(field: str) -> float:
    """Return VmRSS (now) or VmHWM (peak since the last reset) of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) / 1024


def measure(
    side: str, repeats: int, samples: int, length: int, anchors: int, layers: int, slots: int
) -> dict[str, float]:
    """Time the steps of one side in this process."""
    drafter, ends, inputs = make_inputs(samples, length, anchors, layers)
    step = our_step if side == "ours" else dense_step
    # libraries load and threads start before the measurement
    step(*make_inputs(1, 32, 2, 1), slots)
    # 5 resets the peak to the current size
    Path("/proc/self/clear_refs").write_text("5")
    before, seconds, cpu_seconds, loss = resident_mb("VmRSS"), [], [], 0.0
    for _ in range(repeats):
        drafter.zero_grad(set_to_none=True)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss = step(drafter, ends, inputs, slots)
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
    gradient = float(sum(p.grad.double().square().sum() for p in drafter.parameters())) ** 0.5
    return {
        "seconds": min(seconds),
        "cpu_seconds": min(cpu_seconds),
        "peak_mb": resident_mb("VmHWM") - before,
        "loss": loss,
        "gradient": gradient,
    }


def in_process(side: str, repeats: int, **size: int) -> dict[str, float]:
    """Run `measure` in a new process."""
    numbers = [str(repeats), *(str(size[name]) for name in BASE)]
    command = [sys.executable, "-m", "benchmarks.drafter_step", "--child", side, *numbers]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def table_rows(*, quick: bool) -> list[tuple[str, str, dict[str, int]]]:
    """Return side, name and sizes of each row."""
    rows = [
        ("dense", "dense mask, full logits", BASE),
        ("ours", "ours, one chunk", BASE),
        ("ours", "ours, chunks of 1024 slots", {**BASE, "max_draft_slots": 1024}),
    ]
    if not quick:
        one = {**BASE, "layers": 1, "samples": 4, "max_draft_slots": 1024}
        rows += [("ours", f"1 layer, {n} anchors", {**one, "anchors": n}) for n in (32, 64, 128, 256)]
        far = {**one, "anchors": 32}
        rows += [("ours", f"1 layer, context {n}", {**far, "length": n}) for n in (512, 1024, 2048, 4096)]
    return rows


def summarise(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return our side relative to the dense one, and the growth with 8 times the anchors or context."""
    dense, whole, chunked = results[:3]
    summary = {
        "speedup": dense["seconds"] / chunked["seconds"],
        "speedup_cpu": dense["cpu_seconds"] / chunked["cpu_seconds"],
        "speedup_one_chunk": dense["seconds"] / whole["seconds"],
        "memory_share": chunked["peak_mb"] / dense["peak_mb"],
        "memory_share_one_chunk": whole["peak_mb"] / dense["peak_mb"],
        "gradient_difference": abs(chunked["gradient"] / dense["gradient"] - 1),
    }
    for word in ("anchors", "context"):
        grown = [r for r in results if r["name"].startswith("1 layer") and word in r["name"]]
        if grown:
            summary[f"growth_{word}_8x"] = grown[-1]["cpu_seconds"] / grown[0]["cpu_seconds"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the two sides alone, no scaling")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, *numbers = args.child
        print(json.dumps(measure(side, *map(int, numbers))))
        return
    results = []
    print(f"{'':<28} {'seconds':>8} {'CPU s':>8} {'peak MB':>8} {'loss':>9} {'gradient':>9}")
    for side, name, size in table_rows(quick=args.quick):
        result = in_process(side, args.repeats, **size)
        results.append({"name": name, "side": side, **size, **result})
        print(
            f"{name:<28} {result['seconds']:8.2f} {result['cpu_seconds']:8.2f} {result['peak_mb']:8.0f} "
            f"{result['loss']:9.5f} {result['gradient']:9.5f}",
            flush=True,
        )
    summary = summarise(results)
    print(
        f"in chunks: {summary['speedup']:.2f} times as fast ({summary['speedup_cpu']:.2f} in CPU seconds), "
        f"{summary['memory_share']:.2f} of the memory; "
        f"one chunk: {summary['speedup_one_chunk']:.2f} times, {summary['memory_share_one_chunk']:.2f}"
    )
    for word in ("anchors", "context"):
        if f"growth_{word}_8x" in summary:
            print(f"8 times the {word}: {summary[f'growth_{word}_8x']:.1f} times the CPU seconds")
    print(json.dumps({**summary, "rows": results}))


if __name__ == "__main__":
    main()
