"""Batch plans and other samplers and packers on the same lengths: efficiency, mixing, balance, time.

    python -m benchmarks.batching                            # 902,000 synthetic lengths, installed peers
    python -m benchmarks.batching --lengths lengths.npy      # your own lengths
    python -m benchmarks.batching --large                    # also 1M, 10M and 100M lengths, one process each

Peers run where they are installed: `pip install .[peers]` brings lhotse and TRL (transformers is there
already). axolotl pins other versions of TRL and transformers, so install it with `pip install --no-deps
axolotl`; then only its file `utils/samplers/multipack.py` is imported. Each peer is measured by its own code,
for one epoch and one seed; lhotse and TRL, which move Python objects or tokens, get at most `--slow-samples`
lengths, and their seconds are scaled to all.

Columns: efficiency = real tokens / slots (packed: / (packs * budget)); fill = real tokens / (microbatches *
budget); over = microbatches over the budget; mix = variance of the mean length between microbatches, and
between steps of 64, relative to its i.i.d. value; again = share of sample pairs of a microbatch that meet
again in the next epoch; balance = largest / mean predicted seconds of 8 ranks in a step of 64.

With `--measured sorted=SPEED random=SPEED ...` (tokens/s of your own machines) the cost model's ratios are
compared with measured ones. Prints a table, then one line of JSON.
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

from benchmarks.batching_peers import BUDGET, WINDOW, draft_slots_of, measure, measure_peers
from benchmarks.speed_check import check_speeds
from benchmarks.support import command
from dflash_core.batching.buckets import edge_curve, length_counts
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig, from_dict

HAND_EDGES = (0, 770, 1216, 1728, 2432, 3296, 8192)
OURS: dict[str, dict[str, Any]] = {
    "packed": {"strategy": "packed"},
    "sorted_fresh": {"strategy": "sorted_fresh"},
    "sorted": {"strategy": "sorted"},
    "random": {"strategy": "random"},
    "bucketed, 6 edges by hand": {"strategy": "bucketed", "edges": HAND_EDGES},
    "bucketed, optimal 6": {"strategy": "bucketed", "num_buckets": 6},
    "bucketed, optimal 16": {"strategy": "bucketed", "num_buckets": 16},
    "bucketed, optimal 32": {"strategy": "bucketed", "num_buckets": 32},
    "static, 6 edges by hand": {"strategy": "bucketed", "edges": HAND_EDGES, "shapes": "static"},
    "static, optimal 16": {"strategy": "bucketed", "num_buckets": 16, "shapes": "static"},
    "static, optimal 32": {"strategy": "bucketed", "num_buckets": 32, "shapes": "static"},
}


def synthetic_lengths(n: int, seed: int = 20261129) -> np.ndarray:
    """Return int32[n] in [64, 8192].

    Three lognormals whose six optimal buckets are those of a known set of 902,000 chats.
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
    """Return means over seeds; seconds are those of the fastest epoch."""
    slots = draft_slots_of(lengths)
    # Compiles.
    build_plan(lengths[:1000], BatchingConfig(**settings), seed=0, epoch=0, draft_slots=slots[:1000])
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
    """Return seconds and peak memory of a packed and a sorted_fresh epoch, each in a separate process."""
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
                child = [sys.executable, "-m", "benchmarks.batching", "--child", str(path), strategy]
                done = subprocess.run(child, capture_output=True, text=True, check=True)
                out.append(json.loads(done.stdout) | {"samples": size, "strategy": strategy})
    return out


def build_in_child(path: str, strategy: str) -> None:
    """Print seconds and memory of one plan as JSON."""
    config = from_dict(BatchingConfig, {"strategy": strategy})
    lengths = np.load(path)
    build_plan(lengths[:1000], config, seed=0, epoch=0)  # compiles
    empty = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, start_cpu = time.perf_counter(), time.process_time()
    plan = build_plan(lengths, config, seed=0, epoch=0)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = {"peak_gb": peak / 1e6, "added_gb": (peak - empty) / 1e6}
    row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "microbatches": plan.num_microbatches}
    command.print_json(row | memory)


def time_edges(lengths: np.ndarray) -> dict[str, float]:
    """Return the seconds for the optimal edges of all bucket counts up to 64, and the knee of the curve."""
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


# Heads of the table's columns, and the figures in them.
COLUMNS = {
    "batches": "microbatches",
    "effic.": "efficiency",
    "fill": "fill",
    "over": "over",
    "mix mb": "mix_microbatch",
    "mix step": "mix_step",
    "again": "again",
    "balance": "balance",
    "target": "balance_target",
    "attn": "balance_attention",
    "draft": "balance_draft",
}


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'':46}" + "".join(f"{head:>9}" for head in COLUMNS) + f"{'seconds':>9}{'shapes':>8}")
    for label, row in rows.items():
        counts = ("microbatches", "over")
        cells = [f"{row[n]:9,.0f}" if n in counts else f"{row[n]:9.4f}" for n in COLUMNS.values()]
        print(f"{label[:45]:46}" + "".join(cells) + f"{row['seconds']:9.3f}{row['shapes']:8,.0f}")


def compare_speeds(lengths: np.ndarray, measured: dict[str, float]) -> dict[str, Any]:
    """Print and return the cost model's speeds relative to `sorted` next to measured ones."""
    works = {}
    for strategy in measured:
        config = from_dict(BatchingConfig, {"strategy": strategy, "edges": HAND_EDGES})
        works[strategy] = build_plan(lengths, config, seed=0, epoch=0).work
    check = check_speeds(works, measured, relative_to="sorted")
    pairs = [f"{name} {check.predicted[name]:.3f} / {check.measured[name]:.3f}" for name in works]
    factors = {term: round(factor, 2) for term, factor in check.explanation.items()}
    print("speed relative to sorted, predicted / measured:", ", ".join(pairs))
    print("the worst one fits when one constant is multiplied:", factors)
    return check.__dict__


def measured_speed(text: str) -> tuple[str, float]:
    """Parse NAME=SPEED."""
    name, _, speed = text.partition("=")
    return name, float(speed)


def arguments() -> argparse.Namespace:
    parser = command.parser(__doc__)
    parser.add_argument("--lengths", type=Path, help=".npy of whole numbers; default: synthetic")
    parser.add_argument("--num-samples", type=int, default=902_000, help="synthetic lengths")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slow-samples", type=int, default=100_000, help="lengths for lhotse and TRL")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name contains one of these, comma-separated")
    parser.add_argument("--large", action="store_true", help="also 1M, 10M and 100M lengths")
    speeds = "measured tokens/s of strategies, sorted among them"
    parser.add_argument("--measured", type=measured_speed, nargs="+", metavar="NAME=SPEED", help=speeds)
    parser.add_argument("--child", nargs=2, metavar=("PATH", "STRATEGY"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.child:
        build_in_child(*args.child)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lengths = np.load(args.lengths).astype(np.int32) if args.lengths else synthetic_lengths(args.num_samples)

    def wanted(name: str) -> bool:
        return any(part in name for part in args.only.split(","))

    chosen = {name: settings for name, settings in OURS.items() if wanted(name)}
    ours = {name: measure_ours(lengths, settings, args.seeds) for name, settings in chosen.items()}
    peers = {} if args.no_peers else measure_peers(lengths, args.slow_samples, wanted)
    bound = -(-int(lengths.sum(dtype=np.int64)) // BUDGET)
    size = f"{len(lengths):,} lengths, mean {lengths.mean():,.1f}, longest {lengths.max():,}"
    print(f"{size}; {BUDGET:,} slots; lower bound {bound:,} packs;")
    print(f"ours: means of {args.seeds} seeds, seconds (wall) of the fastest epoch")
    print_table(ours | peers)
    check = compare_speeds(lengths, dict(args.measured)) if args.measured else None
    edges = time_edges(lengths)
    for name, value in edges.items():
        print(f"{name}: {value:.3f}")
    large = measure_large([1_000_000, 10_000_000, 100_000_000]) if args.large else []
    for row in large:
        speed = f"{row['seconds']:7.2f} s ({row['cpu_seconds']:.2f} s of CPU)"
        print(f"{row['samples']:>12,} {row['strategy']:13} {speed} {row['peak_gb']:6.2f} GB at peak")
    axolotl = [row for name, row in peers.items() if name.startswith("axolotl")]
    ratio = axolotl[0]["seconds"] / ours["packed"]["seconds"] if axolotl and "packed" in ours else None
    if ratio:
        print(f"packed: {ratio:.1f} times as fast as axolotl's multipack")
    figures = {"lower_bound": bound, "ours": ours, "peers": peers, "edges": edges, "speed_check": check}
    command.print_json(figures | {"large": large, "speed_over_axolotl": ratio})


if __name__ == "__main__":
    main()
