"""Batch plans beside other people's samplers and packers, on the same lengths: efficiency, mixing, balance,
time.

    python benchmarks/batching.py                            # 902,000 synthetic lengths, 5 seeds, installed
    peers python benchmarks/batching.py --lengths lengths.npy      # your own
    python benchmarks/batching.py --large                    # also 1M, 10M and 100M lengths, each in its own
    process

Peers run when they import: `pip install .[peers]` brings lhotse and TRL (transformers is there already).
axolotl pins other versions of TRL and transformers, so install it with `pip install --no-deps axolotl`; then
its file `utils/samplers/multipack.py` alone is imported. Each peer is measured by its own code, one epoch,
one seed; lhotse and TRL, which move Python objects or tokens, get at most `--slow-samples` lengths, and their
seconds are scaled to all.

Columns: efficiency = real tokens / slots (packed: / (packs * budget)); fill = real tokens / (microbatches *
budget); over = microbatches over the budget; mix = variance of mean length between microbatches, and between
steps of 64, over its i.i.d. value; again = pairs of samples that share a microbatch in two epochs running;
balance = largest / mean predicted seconds of 8 ranks in a step of 64. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dflash_core.batching.buckets import edge_curve, length_counts
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig, from_dict

sys.path.insert(0, str(Path(__file__).parent))
from batching_peers import BUDGET, WINDOW, draft_slots_of, measure, measure_peers  # noqa: E402
from speed_check import check_speeds  # noqa: E402

SEED_PROJECT_EDGES = (0, 770, 1216, 1728, 2432, 3296, 8192)
SEED_PROJECT_SPEEDS = {"sorted": 31_000.0, "random": 11_900.0, "bucketed": 25_100.0}  # tokens/s
OURS: dict[str, dict[str, Any]] = {
    "packed": {"strategy": "packed"},
    "sorted_fresh": {"strategy": "sorted_fresh"},
    "sorted": {"strategy": "sorted"},
    "random": {"strategy": "random"},
    "bucketed, given 6 edges": {"strategy": "bucketed", "edges": SEED_PROJECT_EDGES},
    "bucketed, optimal 6": {"strategy": "bucketed", "num_buckets": 6},
    "bucketed, optimal 16": {"strategy": "bucketed", "num_buckets": 16},
    "bucketed, optimal 32": {"strategy": "bucketed", "num_buckets": 32},
    "static, given 6 edges": {"strategy": "bucketed", "edges": SEED_PROJECT_EDGES, "shapes": "static"},
    "static, optimal 16": {"strategy": "bucketed", "num_buckets": 16, "shapes": "static"},
    "static, optimal 32": {"strategy": "bucketed", "num_buckets": 32, "shapes": "static"},
}


def synthetic_lengths(n: int, seed: int = 20261129) -> np.ndarray:
    """int32[n] in [64, 8192]: three lognormals whose optimal six buckets are those of a known set of 902,000
    chats.
    """
    rng = np.random.default_rng(seed)
    weight = np.exp([0, -1.7486, -1.415])
    mu, sigma = np.array([7.1017, 6.5227, 8.0999]), np.array([0.4881, 0.0642, 0.0572])
    out = np.empty(0, np.int32)
    while len(out) < n:
        kind = rng.choice(3, size=min(n, 2_000_000), p=weight / weight.sum())
        drawn = np.ceil(np.exp(mu[kind] + sigma[kind] * rng.standard_normal(len(kind))))
        out = np.concatenate([out, drawn[(drawn >= 64) & (drawn <= 8192)].astype(np.int32)])
    return out[:n]


def measure_ours(lengths: np.ndarray, settings: dict[str, Any], num_seeds: int) -> dict[str, float]:
    """Means over seeds; seconds: the fastest epoch."""
    slots = draft_slots_of(lengths)
    build_plan(
        lengths[:1000], BatchingConfig(**settings), seed=0, epoch=0, draft_slots=slots[:1000]
    )  # compile
    probe = build_plan(lengths, BatchingConfig(**settings), seed=0, epoch=0)
    step = int((WINDOW - 0.5) * probe.tokens.mean())
    config = BatchingConfig(**settings, tokens_per_step=step)
    rows = []
    for seed in range(num_seeds):
        before = build_plan(lengths, config, seed=seed, epoch=0, draft_slots=slots)
        start, start_cpu = time.perf_counter(), time.process_time()
        plan = build_plan(lengths, config, seed=seed, epoch=1, draft_slots=slots)
        seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - start_cpu}
        rows.append(measure(plan, before) | seconds)
    out = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    out |= {name: min(row[name] for row in rows) for name in ("seconds", "cpu_seconds")}
    return out | {"most_microbatches": max(row["microbatches"] for row in rows)}


def measure_large(sizes: list[int]) -> list[dict[str, float]]:
    """Seconds and peak memory of one packed and one sorted_fresh epoch, each size in a process of its own."""
    out = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lengths.npy"
        unit = synthetic_lengths(1_000_000)
        for size in sizes:
            lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(size,))
            for start in range(0, size, len(unit)):
                lengths[start : start + len(unit)] = unit[: size - start]
            lengths.flush()
            del lengths
            for strategy in ("packed", "sorted_fresh"):
                command = [sys.executable, __file__, "--child", str(path), strategy]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                out.append(json.loads(done.stdout) | {"samples": size, "strategy": strategy})
    return out


def child(path: str, strategy: str) -> None:
    config = from_dict(BatchingConfig, {"strategy": strategy})
    lengths = np.load(path)
    build_plan(lengths[:1000], config, seed=0, epoch=0)  # compile
    empty = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, start_cpu = time.perf_counter(), time.process_time()
    plan = build_plan(lengths, config, seed=0, epoch=0)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_gb": peak / 1e6,
        "added_gb": (peak - empty) / 1e6,
    }
    print(json.dumps(row | {"microbatches": plan.num_microbatches}))


def time_edges(lengths: np.ndarray) -> dict[str, float]:
    """Seconds for the optimal edges of all bucket counts up to 64, and the knee of the curve."""
    counts = length_counts(lengths)
    values = np.flatnonzero(counts)
    out = {}
    kinds: tuple[Literal["dynamic", "static"], ...] = ("dynamic", "static")
    for shapes in kinds:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            curve = edge_curve(values, counts[values], max_buckets=64, token_budget=BUDGET, shapes=shapes)
            seconds.append(time.perf_counter() - start)
        out |= {f"edges_{shapes}_seconds": min(seconds), f"knee_{shapes}": float(curve.knee)}
    return out


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    heads = (
        "batches",
        "effic.",
        "fill",
        "over",
        "mix mb",
        "mix step",
        "again",
        "balance",
        "target",
        "attn",
        "draft",
    )
    names = ("microbatches", "efficiency", "fill", "over", "mix_microbatch", "mix_step", "again", "balance")
    names += ("balance_target", "balance_attention", "balance_draft")
    print(f"{'':46}" + "".join(f"{head:>9}" for head in heads) + f"{'seconds':>9}{'shapes':>8}")
    for label, row in rows.items():
        cells = [f"{row[n]:9,.0f}" if n in ("microbatches", "over") else f"{row[n]:9.4f}" for n in names]
        print(f"{label[:45]:46}" + "".join(cells) + f"{row['seconds']:9.3f}{row['shapes']:8,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help=".npy of whole numbers; default: synthetic")
    parser.add_argument("--num-samples", type=int, default=902_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slow-samples", type=int, default=100_000)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name contains one of these, comma-separated")
    parser.add_argument("--large", action="store_true", help="also 1M, 10M and 100M lengths")
    parser.add_argument("--child", nargs=2, metavar=("PATH", "STRATEGY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lengths = np.load(args.lengths).astype(np.int32) if args.lengths else synthetic_lengths(args.num_samples)

    def wanted(name: str) -> bool:
        return any(part in name for part in args.only.split(","))

    ours = {
        name: measure_ours(lengths, settings, args.seeds) for name, settings in OURS.items() if wanted(name)
    }
    peers = {} if args.no_peers else measure_peers(lengths, args.slow_samples, wanted)
    bound = -(-int(lengths.sum(dtype=np.int64)) // BUDGET)
    print(
        f"{len(lengths):,} lengths, mean {lengths.mean():,.1f}, longest {lengths.max():,}; {BUDGET:,} slots;"
    )
    print(
        f"lower bound {bound:,} packs; ours: means of {args.seeds} seeds, seconds (wall) of the fastest epoch"
    )
    print_table(ours | peers)
    works = {
        name: build_plan(
            lengths,
            from_dict(BatchingConfig, {"strategy": name, "edges": SEED_PROJECT_EDGES}),
            seed=0,
            epoch=0,
        ).work
        for name in ("sorted", "random", "bucketed")
    }
    check = check_speeds(works, SEED_PROJECT_SPEEDS, relative_to="sorted")
    edges = time_edges(lengths)
    for name, value in edges.items():
        print(f"{name}: {value:.3f}")
    print("speed relative to sorted, predicted / measured:", end=" ")
    print(", ".join(f"{name} {check.predicted[name]:.3f} / {check.measured[name]:.3f}" for name in works))
    print(
        "random fits when one constant is multiplied:", {k: round(v, 2) for k, v in check.explanation.items()}
    )
    large = measure_large([1_000_000, 10_000_000, 100_000_000]) if args.large else []
    for row in large:
        speed = (
            f"{row['seconds']:7.2f} s ({row['cpu_seconds']:.2f} s of CPU) {row['peak_gb']:6.2f} GB at peak"
        )
        print(f"{row['samples']:>12,} {row['strategy']:13} {speed}")
    axolotl = [row for name, row in peers.items() if name.startswith("axolotl")]
    ratio = axolotl[0]["seconds"] / ours["packed"]["seconds"] if axolotl and "packed" in ours else None
    if ratio:
        print(f"packed: {ratio:.1f} times as fast as axolotl's multipack")
    print(
        json.dumps(
            {
                "lower_bound": bound,
                "ours": ours,
                "peers": peers,
                "edges": edges,
                "seed_check": check.__dict__,
                "large": large,
                "speed_over_axolotl": ratio,
            }
        )
    )


if __name__ == "__main__":
    main()
