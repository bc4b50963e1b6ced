"""The cost model against the machine, and the strategies against each other, measured in turns.

    python -m benchmarks.cost_model runs/compare-quickstart/RUN                  # about ten minutes on two cores
    python -m benchmarks.cost_model RUN_DIRECTORY --microbatches 4 --rounds 3    # a sample of each plan

Takes target, data and settings of a run that has been started. Of each strategy's plan of epoch 0 it times the
microbatches (all, or some at even distances), capture and drafter forward and backward, while it calibrates the
constants on others. All take turns, strategy after strategy, so that a machine whose speed drifts drifts under all:
`compare-strategies` trains one strategy after the other and can't. Prints real tokens/s, their ratio to `sorted`, and
predicted / measured for each strategy and for each of the two parts, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_core.anchors import draft_slots
from dflash_core.batching.plan import build_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.training.calibrate import Meter, fit_cost_model, work_of
from dflash_core.training.run import RunSpec


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's directory, as the flows write it")
    parser.add_argument("--microbatches", type=int, help="of each strategy; default: all of the epoch")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is timed; the mean counts")
    args = parser.parse_args()
    run = RunSpec.load(args.run / "run.json")
    meter, config = Meter(run), run.config
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
        count = min(args.microbatches or plan.num_microbatches, plan.num_microbatches)
        spaced = np.linspace(0, plan.num_microbatches, count, endpoint=False, dtype=int)
        chosen[strategy] = [
            meter.build(rows[plan.order[plan.offsets[m] : plan.offsets[m + 1]]], int(plan.widths[m]))
            for m in spaced
        ]
    turns = sorted(
        (
            ((at + 0.5) / len(own), strategy, m)
            for strategy, own in chosen.items()
            for at, m in enumerate(own)
        ),
        key=lambda turn: turn[0],
    )
    between = [microbatch for _, _, microbatch in turns]
    found, seconds = fit_cost_model(
        meter,
        between,
        lambda done, total: print(f"{done}/{total} microbatches", end="\r", flush=True),
        between_rounds=args.rounds,
    )
    model, work = found.model, work_of(between, meter.block_size)
    parts = model.parts(work)
    predicted = np.stack(
        [sum(v for k, v in parts.items() if k.startswith(part)) for part in ("capture", "train")], axis=1
    )
    strategies = np.array([strategy for _, strategy, _ in turns])
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
    print(json.dumps({"strategies": figures, "token_budget": config.batching.token_budget}))


if __name__ == "__main__":
    main()
