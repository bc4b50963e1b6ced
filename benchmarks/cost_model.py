"""Predictions of the cost model and measured speeds of the strategies, which take turns on this machine.

    python -m benchmarks.cost_model runs/compare-quickstart/RUN                # ten minutes on two cores
    python -m benchmarks.cost_model RUN_DIRECTORY --microbatches 4 --rounds 3  # a sample of each plan

Takes target, data and settings of a run that has been started. Of each strategy's plan of epoch 0 it times
the microbatches (all, or some at even distances), capture and drafter forward and backward, while it
calibrates the constants on others. Strategies take turns, so a machine whose speed drifts affects all of them
alike; `compare-strategies` trains one strategy after the other and cannot do that. Prints real tokens/s,
their ratio to `sorted`, and predicted / measured for each strategy and for each of the two parts, then one
line of JSON.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import command
from dflash_core.anchors import draft_slots
from dflash_core.batching.plan import build_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.training.calibrate import Meter, fit_cost_model, work_of
from dflash_core.training.run import RunSpec


def microbatches_by_strategy(meter: Meter, limit: int | None) -> dict[str, list[Any]]:
    """Build the microbatches of every strategy's plan of epoch 0, or so many at even distances."""
    config = meter.config
    rows = meter.store.train_indices
    lengths = meter.store.lengths[rows]
    slots = draft_slots(
        meter.store.num_eligible[rows],
        num_anchors=config.objective.num_anchors,
        block_size=config.drafter.block_size,
    )
    chosen = {}
    for strategy in STRATEGIES:
        batching = replace(config.batching, strategy=strategy)
        plan = build_plan(lengths, batching, seed=config.training.seed, epoch=0, draft_slots=slots)
        count = min(limit or plan.num_microbatches, plan.num_microbatches)
        spaced = np.linspace(0, plan.num_microbatches, count, endpoint=False, dtype=int)
        chosen[strategy] = [
            meter.build(rows[plan.order[plan.offsets[m] : plan.offsets[m + 1]]], int(plan.widths[m]))
            for m in spaced
        ]
    return chosen


def take_turns(chosen: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Return all (strategy, microbatch), each strategy's spread evenly over the whole order."""
    turns = [
        ((position + 0.5) / len(microbatches), strategy, microbatch)
        for strategy, microbatches in chosen.items()
        for position, microbatch in enumerate(microbatches)
    ]
    return [(strategy, microbatch) for _, strategy, microbatch in sorted(turns, key=lambda turn: turn[0])]


def print_progress(num_done: int, total: int) -> None:
    print(f"{num_done}/{total} microbatches", end="\r", flush=True)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("run", type=Path, help="directory of a run, as the flows write it")
    parser.add_argument("--microbatches", type=int, help="per strategy; default: all of the epoch")
    parser.add_argument("--rounds", type=int, default=1, help="times each is measured; the mean counts")
    args = parser.parse_args()
    run = RunSpec.load(args.run / "run.json")
    meter = Meter(run)
    turns = take_turns(microbatches_by_strategy(meter, args.microbatches))
    between = [microbatch for _, microbatch in turns]
    calibration, seconds = fit_cost_model(meter, between, print_progress, between_rounds=args.rounds)
    work = work_of(between, meter.block_size)
    terms = calibration.model.parts(work)
    parts = [sum(v for k, v in terms.items() if k.startswith(part)) for part in ("capture", "train")]
    predicted = np.stack(parts, axis=1)
    strategies = np.array([strategy for strategy, _ in turns])
    rate = {s: work.tokens[strategies == s].sum() / seconds[strategies == s].sum() for s in STRATEGIES}
    print(
        f"{'strategy':>14} microbatches  tokens  slots  measured s  real tokens/s  to sorted"
        "  predicted / measured  capture  drafter"
    )
    figures = {}
    for strategy in STRATEGIES:
        own = strategies == strategy
        ratio = predicted[own].sum() / seconds[own].sum()
        capture, drafter = predicted[own].sum(axis=0) / seconds[own].sum(axis=0)
        figures[strategy] = {
            "tokens_per_second": rate[strategy],
            "to_sorted": rate[strategy] / rate["sorted"],
            "predicted_to_measured": ratio,
            "capture": capture,
            "drafter": drafter,
        }
        print(
            f"{strategy:>14} {own.sum():>12} {work.tokens[own].sum():>7,} {work.slots[own].sum():>6,}"
            f" {seconds[own].sum():>11.1f} {rate[strategy]:>14.1f} {rate[strategy] / rate['sorted']:>10.3f}"
            f" {ratio:>21.3f} {capture:>8.3f} {drafter:>8.3f}"
        )
    command.print_json({"strategies": figures, "token_budget": run.config.batching.token_budget})


if __name__ == "__main__":
    main()
