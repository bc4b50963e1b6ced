"""Check and time the CUDA kernels on this machine's GPU, at Qwen3-8B shapes. Ends within 8 minutes.

    python -m benchmarks.kernels

1. Numerics: values and gradients in bfloat16 compared with float64, and that two backward
   passes are bit-equal.
2. Vocabulary loss, forward and backward to the hidden states, 7,680 positions, D 4,096, V 151,936: compared
   with full logits, and with Liger's fused linear cross-entropy where `liger_kernel` is installed. Memory is
   the peak that a call adds, as a share of the bfloat16 logits.
3. Block attention, forward and backward, compared with compiled `flex_attention`: 32 query and 8 key/value
   heads of 128, 512 blocks of 16 slots, contexts of 2K to 32K. Anchors are new in every step, so the time of
   `flex_attention` includes making its block mask (compiled too); a separate column excludes it.

Cheap figures come first: the product's own times at every context before the first compiled peer. After 7
minutes no further comparison starts; after 7:50 one that hangs (in a compilation, say) is abandoned and the
measurements so far are printed. Prints tables, then one line of JSON with the same figures; it never prints
a time that it did not measure. Exit code 1: a numeric check failed, or the time limit ended the script; 2:
no CUDA device.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_core.kernels.block_attention import block_attention, block_attention_reference
from dflash_core.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

# a comparison that would start later is reported as skipped
TIME_LIMIT_SECONDS = 420.0
# the process exits here
HARD_LIMIT_SECONDS = 470.0
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_ANCHORS = 32, 8, 128, 16, 512
CONTEXTS = (2_048, 4_096, 8_192, 16_384, 32_768)
WIDTH, VOCABULARY, NUM_POSITIONS = 4_096, 151_936, NUM_ANCHORS * (BLOCK_SIZE - 1)
STARTED = time.monotonic()


def time_left() -> bool:
    return time.monotonic() - STARTED < TIME_LIMIT_SECONDS


def measure(step: Callable[[int], None], *, warmup: int = 3, repeats: int = 10) -> dict[str, float]:
    """Return the median time of step(i) in ms, and the MB that a call adds at its peak."""
    for i in range(warmup):
        step(i)
    torch.cuda.synchronize()
    times = []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for i in range(warmup, warmup + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(i)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return {"ms": statistics.median(times), "peak_mb": peak / 2**20}


def draw(*shape: int, seed: int, scale: float = 1.0, dtype=torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def draw_anchors(context: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randperm(context, generator=generator, device="cuda")[:NUM_ANCHORS].sort().values.int()


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def attention_tensors(A: int, K: int, T: int, N: int, G: int, H: int) -> list[Tensor]:
    shapes = [(A, K, N, H), (T, G, H), (T, G, H), (A, K, G, H), (A, K, G, H)]
    return [draw(*shape, seed=i) for i, shape in enumerate(shapes)]


# ---- numerics


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of any pair, as a share of the expected tensor's largest value."""
    return max(((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(actual, expected))


def attention_numerics() -> list[dict[str, Any]]:
    results = []
    shapes = (16, 32, 8, 128, None), (16, 32, 8, 128, 512), (8, 9, 3, 64, None), (10, 8, 4, 96, None)
    for K, N, G, H, window in shapes:
        lengths, per_sample = (37, 1_500, 511), (3, 60, 33)
        starts, anchors, first = [], [], 0
        for length, count in zip(lengths, per_sample):
            rows = torch.randperm(length, generator=torch.Generator().manual_seed(K))[:count].sort().values
            anchors += [first + row for row in rows.tolist()]
            starts += [first] * count
            first += length
        index = {"context_start_A": starts, "anchor_A": anchors}
        index = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in index.items()}
        tensors = attention_tensors(len(anchors), K, first, N, G, H)
        dout = draw(len(anchors), K, N, H, seed=9)
        runs = []
        for function, inputs, gradient in (
            (block_attention, tensors, dout),
            (block_attention, tensors, dout),
            (block_attention_reference, [x.double() for x in tensors], dout.double()),
        ):
            inputs = leaves(inputs)
            out = function(*inputs, **index, sliding_window=window)
            out.backward(gradient)
            runs.append([out.detach(), *(x.grad for x in inputs)])
        error, same = relative_error(runs[0], runs[2]), all(torch.equal(x, y) for x, y in zip(*runs[:2]))
        name = f"attention K {K} heads {N}/{G} x {H} window {window}"
        results.append({"case": name, "error": error, "repeatable": same, "passed": same and error < 0.02})
    return results


def loss_numerics() -> list[dict[str, Any]]:
    results = []
    for D, V, soft in ((WIDTH, VOCABULARY, False), (WIDTH, VOCABULARY, True), (576, 49_153, False)):
        hidden, head = draw(300, D, seed=1), draw(V, D, seed=2, scale=3 * D**-0.5)
        labels = (hidden.float() @ head.float().T).argmax(dim=-1)
        labels[::2] = torch.arange(0, 150, device="cuda")
        target = draw(300, D, seed=3) if soft else None
        weights = torch.rand(300, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
        weights[::7] = 0
        runs = []
        for function, cast in (
            (linear_cross_entropy, lambda x: x),
            (linear_cross_entropy, lambda x: x),
            (linear_cross_entropy_reference, lambda x: x.double()),
        ):
            [leaf] = leaves([cast(hidden)])
            soft_target = None if target is None else cast(target)
            result = function(leaf, cast(head), labels, soft_target_PD=soft_target)
            (result.loss_P * weights.to(result.loss_P.dtype)).sum().backward()
            runs.append([result.loss_P.detach(), result.log_prob_P, leaf.grad, result.correct_P])
        error = relative_error(runs[0][:3], runs[2][:3])
        same = all(torch.equal(x, y) for x, y in zip(*runs[:2]))
        exact = bool((runs[0][2][::7] == 0).all()) and torch.equal(runs[0][3], runs[2][3])
        name = f"loss D {D} V {V}{' soft target' if soft else ''}"
        passed = same and exact and error < 0.02
        results.append({"case": name, "error": error, "repeatable": same, "passed": passed})
    return results


# ---- block attention


def product_attention_step(context: int) -> Callable[[int], None]:
    tensors = leaves(attention_tensors(NUM_ANCHORS, BLOCK_SIZE, context, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM))
    dout = draw(NUM_ANCHORS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM, seed=9)
    start = torch.zeros(NUM_ANCHORS, dtype=torch.int32, device="cuda")
    all_anchors = [draw_anchors(context, seed) for seed in range(20)]

    def step(i: int) -> None:
        out = block_attention(*tensors, context_start_A=start, anchor_A=all_anchors[i])
        torch.autograd.grad(out, tensors, dout)

    return step


def flex_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Return q [1, N, A * K, H], and k and v [1, G, T + A * K, H], with the same values."""
    q, k_ctx, v_ctx, k_blk, v_blk = tensors
    rows = [q.flatten(0, 1), torch.cat([k_ctx, k_blk.flatten(0, 1)]), torch.cat([v_ctx, v_blk.flatten(0, 1)])]
    return [x.transpose(0, 1)[None].contiguous() for x in rows]


def flex_attention_steps(context: int) -> dict[str, Callable[[int], None]]:
    """Return steps of the same attention, with a new mask in each step and with a fixed one.

    Both share the compiled kernels. Keys are [context ; all blocks], concatenated beforehand and not timed.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, make_mask = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)
    num_slots = NUM_ANCHORS * BLOCK_SIZE
    tensors = attention_tensors(NUM_ANCHORS, BLOCK_SIZE, context, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    q, k, v = leaves(flex_inputs(tensors))
    dout = draw(1, NUM_HEADS, num_slots, HEAD_DIM, seed=9)
    all_anchors = [draw_anchors(context, seed) for seed in range(20)]
    # one buffer, overwritten in each step, so that nothing is compiled again
    anchors = all_anchors[0].clone()

    def visible(b, h, slot, key):
        block = slot // BLOCK_SIZE
        return torch.where(key < context, key < anchors[block], (key - context) // BLOCK_SIZE == block)

    def mask():
        return make_mask(visible, None, None, num_slots, context + num_slots, device="cuda")

    fixed_mask = mask()
    actual = attend(q, k, v, block_mask=fixed_mask, enable_gqa=True)[0]
    actual = actual.transpose(0, 1).unflatten(0, (-1, BLOCK_SIZE))
    start = torch.zeros_like(anchors)
    expected = block_attention(*tensors, context_start_A=start, anchor_A=anchors)
    # both sides compute the same
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)

    def new_mask(i: int) -> None:
        anchors.copy_(all_anchors[i])
        torch.autograd.grad(attend(q, k, v, block_mask=mask(), enable_gqa=True), (q, k, v), dout)

    def mask_given(i: int) -> None:
        torch.autograd.grad(attend(q, k, v, block_mask=fixed_mask, enable_gqa=True), (q, k, v), dout)

    # the given mask belongs to the first anchors, so it is timed before `new_mask` overwrites them
    return {"flex_mask_given": mask_given, "flex": new_mask}


def attention_timings(results: list[dict[str, Any]]) -> None:
    """Fill `results`, one row per context."""
    for context in CONTEXTS:
        pairs = statistics.mean(draw_anchors(context, s).sum().item() + 512 * 16 for s in range(3, 13))
        product = measure(product_attention_step(context))
        # 2 products forward, 5 in any backward
        flops = 14 * HEAD_DIM * NUM_HEADS * BLOCK_SIZE * pairs
        results.append({"context": context, "product": product | {"tflops": flops / product["ms"] / 1e9}})
    for row in results:
        if not time_left():
            row["skipped"] = "out of time"
            continue
        try:
            for name, step in flex_attention_steps(row["context"]).items():
                row[name] = measure(step)
            row["speedup"] = row["flex"]["ms"] / row["product"]["ms"]
        except Exception as error:
            # a peer that does not run here is reported, not hidden
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        torch._dynamo.reset()
        torch.cuda.empty_cache()


# ---- vocabulary loss


def loss_steps() -> dict[str, Callable[[int], None]]:
    hidden = draw(NUM_POSITIONS, WIDTH, seed=1).requires_grad_()
    head = draw(VOCABULARY, WIDTH, seed=2, scale=WIDTH**-0.5)
    labels = torch.randint(VOCABULARY, (NUM_POSITIONS,), device="cuda")
    weights = torch.rand(NUM_POSITIONS, device="cuda")

    def product(i: int) -> None:
        torch.autograd.grad((linear_cross_entropy(hidden, head, labels).loss_P * weights).sum(), hidden)

    def soft_target(i: int) -> None:
        result = linear_cross_entropy(hidden, head, labels, soft_target_PD=hidden.detach())
        torch.autograd.grad((result.loss_P * weights).sum(), hidden)

    def plain(i: int) -> None:
        loss = F.cross_entropy((hidden @ head.T).float(), labels, reduction="none")
        torch.autograd.grad((loss * weights).sum(), hidden)

    steps = {"product": product, "product, soft target": soft_target, "full logits": plain}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return steps
    # it has no per-position weights in backward
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def liger(i: int) -> None:
        torch.autograd.grad(fused(head, hidden, labels), hidden)

    return steps | {"Liger, no weights": liger}


def loss_timings(results: list[dict[str, Any]]) -> None:
    """Fill `results`, one row per implementation."""
    logits_mb = NUM_POSITIONS * VOCABULARY * 2 / 2**20
    for name, step in loss_steps().items():
        if not time_left():
            results.append({"name": name, "skipped": "out of time"})
            continue
        try:
            measured = measure(step)
        except Exception as error:
            results.append({"name": name, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
            torch.cuda.empty_cache()
            continue
        flops = (6 if "soft" in name else 4) * NUM_POSITIONS * VOCABULARY * WIDTH
        share, tflops = measured["peak_mb"] / logits_mb, flops / measured["ms"] / 1e9
        results.append({"name": name, **measured, "share_of_logits": share, "tflops": tflops})


def cell(entry: dict[str, Any] | None, key: str = "ms") -> str:
    return f"{entry[key]:>10.2f}" if entry and key in entry else f"{'-':>10}"


def print_tables(report: dict[str, Any]) -> None:
    """Print the measurements so far as tables, then as one line of JSON."""
    for r in report["numerics"]:
        verdict = f"same bits {r['repeatable']}, {'passed' if r['passed'] else 'FAILED'}"
        print(f"{r['case']:<48} error {r['error']:.1e} of the largest, {verdict}")
    print(f"\n{'vocabulary loss':<24}{'ms':>10}{'TFLOP/s':>10}{'peak MB':>10}{'of logits':>10}")
    for r in report["loss"]:
        note = r.get("skipped") or r.get("failed") or ""
        share = cell(r, "share_of_logits")
        print(f"{r['name']:<24}{cell(r)}{cell(r, 'tflops')}{cell(r, 'peak_mb')}{share} {note}")
    columns = f"{'product ms':>12}{'TFLOP/s':>10}{'flex ms':>10}{'mask given':>11}{'speedup':>10}"
    print(f"\n{'context':>8}{columns}")
    for r in report["attention"]:
        product, flex, given = r.get("product"), r.get("flex"), r.get("flex_mask_given")
        note = r.get("skipped") or r.get("failed") or ""
        times = f"{cell(product)}{cell(product, 'tflops')}{cell(flex)} {cell(given)}"
        print(f"{r['context']:>8}  {times}{cell(r, 'speedup')} {note}")
    if "ended" in report:
        print(report["ended"])
    print(json.dumps(report | {"seconds": round(time.monotonic() - STARTED, 1)}), flush=True)


def give_up(report: dict[str, Any]) -> None:
    """Print the report and exit, whatever the main thread does. A timer calls this at the hard limit."""
    report |= {"passed": False, "ended": f"ended at the limit of {HARD_LIMIT_SECONDS:.0f} s"}
    print_tables(report)
    os._exit(1)


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks.kernels: no CUDA device, nothing was measured", file=sys.stderr)
        return 2
    import triton

    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    report |= {"passed": False, "numerics": [], "loss": [], "attention": []}
    watch = threading.Timer(HARD_LIMIT_SECONDS - (time.monotonic() - STARTED), give_up, [report])
    watch.daemon = True
    watch.start()
    report["numerics"] += attention_numerics()
    report["numerics"] += loss_numerics()
    report["passed"] = all(r["passed"] for r in report["numerics"])
    loss_timings(report["loss"])
    torch.cuda.empty_cache()
    attention_timings(report["attention"])
    watch.cancel()
    print_tables(report)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
