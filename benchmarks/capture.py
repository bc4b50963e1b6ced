"""Capture of hidden states: packed, one by one and padded, compared with the bound of the hardware.

    python -m benchmarks.capture [--target NAME] [--dtype auto] [--samples 16] [--rounds 2]
    python -m benchmarks.capture --clock cpu      # a busy machine: one thread, CPU seconds

Real tokens per second for the same samples (60 to 400 tokens long by default). The bound is the time of the
bare matrix products of the layers that run, same shapes and dtype, with nothing in between; attention, norms
and activations take the rest of the capture time. The ways take turns, and the best round of each counts.
Prints a table, then one line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dflash_core.target.captured_layers import target_layer_ids
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.materialise import materialise
from dflash_core.target.target import Target

ROOT = Path(__file__).parent.parent


def target_directory(name: str) -> Path:
    """Return a local directory as it is; materialise anything else under runs/benchmarks, once."""
    if Path(name).is_dir():
        return Path(name)
    directory = ROOT / "runs" / "benchmarks" / name.replace("/", "--")
    return directory if directory.exists() else materialise(name, directory).directory


@torch.inference_mode()
def bare_products(target: Target, num_tokens: int) -> tuple[Callable[[], None], float]:
    """Return a run of the linear maps of all layers that capture runs, and its floating-point operations."""
    layers = list(target.layers)[: target.layer_ids[-1] + 1]
    weights = [m.weight for layer in layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {
        size: torch.randn(num_tokens, size, device=target.device).to(target.compute_dtype)
        for size in {weight.shape[1] for weight in weights}
    }

    def run() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return run, 2.0 * num_tokens * sum(weight.numel() for weight in weights)


@torch.inference_mode()
def seconds_of(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def capture_ways(
    target: Target, tokens: np.ndarray, bounds: np.ndarray, products: Callable[[], None]
) -> dict[str, Callable[[], object]]:
    """Return the ways to time, by name."""
    width = int(np.diff(bounds).max())

    def one_by_one() -> None:
        for start, end in zip(bounds, bounds[1:]):
            target.capture(tokens[start:end], np.array([0, end - start], dtype=np.int32))

    return {
        "packed": lambda: target.capture(tokens, bounds),
        "one by one": one_by_one,
        "padded": lambda: target.capture(tokens, bounds, width),
        "bare products": products,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m-instruct", help="alias, directory or hub name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=60, help="tokens")
    parser.add_argument("--longest", type=int, default=400, help="tokens")
    parser.add_argument("--layers", type=int, default=5, help="captured layers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: for a busy machine")
    return parser.parse_args()


def load_target(args: argparse.Namespace) -> Target:
    from transformers import AutoConfig

    directory = target_directory(args.target)
    num_layers = AutoConfig.from_pretrained(directory).get_text_config().num_hidden_layers
    layer_ids = target_layer_ids(num_layers, args.layers)
    return Target.load(directory, layer_ids=layer_ids, device=args.device, compute_dtype=args.dtype)


def main() -> None:
    args = parse_args()
    if args.clock == "cpu":
        # CPU seconds of one core; waiting threads would count as work
        torch.set_num_threads(1)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    target = load_target(args)
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.shortest, args.longest + 1, size=args.samples)
    tokens = rng.integers(0, target.embed_weight.shape[0], size=int(lengths.sum()))
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    width, num_tokens = int(lengths.max()), len(tokens)
    products, operations = bare_products(target, num_tokens)
    ways = capture_ways(target, tokens, bounds, products)
    # the first run is slower: not timed
    ways["one by one"]()
    best = {name: float("inf") for name in ways}
    for _ in range(args.rounds):
        for name, run in ways.items():
            best[name] = min(best[name], seconds_of(run, target.device, clock))
    rates = {name: num_tokens / seconds for name, seconds in best.items()}
    efficiency = num_tokens / (width * args.samples)
    dtype = dtype_name(target.compute_dtype)
    sizes = f"{args.samples} samples, {num_tokens} tokens, longest {width}"
    print(f"{sizes}, padding efficiency {efficiency:.2f}, {dtype}")
    for name, rate in rates.items():
        print(f"{name:>14} {rate:9.0f} tokens/s  {rate / rates['packed']:5.2f} of packed")
    figures = {
        "tokens": num_tokens,
        "padding_efficiency": efficiency,
        "dtype": dtype,
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "packed_tokens_per_second": rates["packed"],
        "one_by_one_tokens_per_second": rates["one by one"],
        "padded_tokens_per_second": rates["padded"],
        "bare_products_gflops": operations / best["bare products"] / 1e9,
        "packed_share_of_bare_products": rates["packed"] / rates["bare products"],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
