"""The cost model against the machine: predicted and measured seconds of every strategy's microbatches.

    python -m benchmarks.cost_model runs/compare-quickstart/latest              # about 9 minutes on two cores
    python -m benchmarks.cost_model RUN_DIRECTORY --microbatches 8

Takes target, data and settings of a run that has been started. Of each strategy's plan of epoch 0 it times some
microbatches, evenly spaced, capture and drafter forward and backward, while it calibrates the constants on others. All
take turns, strategy after strategy, three rounds of everything, so that a machine whose speed drifts drifts under all.
Prints predicted / measured (means of the rounds) for each strategy and each of the two parts, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_core.batching import build_plan
from dflash_core.config import STRATEGIES
from dflash_core.model.anchors import draft_slots
from dflash_core.training.calibrate import Meter, calibrate, work_of
from dflash_core.training.setup import Run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's directory, as the flows write it")
    parser.add_argument("--microbatches", type=int, default=4, help="of each strategy")
    args = parser.parse_args()
    run = Run.load(args.run / "run.json")
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
        batching = replace(config.batching, strategy=strategy)  # type: ignore[arg-type]
        plan = build_plan(lengths, batching, seed=config.training.seed, epoch=0, draft_slots=slots)
        spaced = np.linspace(0, plan.num_microbatches, args.microbatches, endpoint=False, dtype=int)
        chosen[strategy] = [
            meter.build(rows[plan.order[plan.offsets[m] : plan.offsets[m + 1]]], int(plan.widths[m]))
            for m in np.unique(spaced)
        ]
    turns = [
        (strategy, microbatches[i])
        for i in range(args.microbatches)
        for strategy, microbatches in chosen.items()
        if i < len(microbatches)
    ]
    between = [microbatch for _, microbatch in turns]
    found, seconds = calibrate(
        meter, between, lambda done, total: print(f"{done}/{total} microbatches", end="\r", flush=True)
    )
    model, work = found.model, work_of(between, meter.block_size)
    parts = model.parts(work)
    predicted = np.stack(
        [sum(v for k, v in parts.items() if k.startswith(part)) for part in ("capture", "train")], axis=1
    )
    strategies = np.array([strategy for strategy, _ in turns])
    print(
        f"{'strategy':>14} microbatches  tokens  slots   measured s  predicted / measured  capture  drafter"
    )
    figures = {}
    for strategy in STRATEGIES:
        own = strategies == strategy
        ratio = predicted[own].sum() / seconds[own].sum()
        capture, drafter = predicted[own].sum(axis=0) / seconds[own].sum(axis=0)
        figures[strategy] = {"predicted_to_measured": ratio, "capture": capture, "drafter": drafter}
        tokens, forward = work.tokens[own].sum(), work.slots[own].sum()
        print(
            f"{strategy:>14} {own.sum():>12} {tokens:>7,} {forward:>6,} {seconds[own].sum():>12.1f}"
            f" {ratio:>21.3f} {capture:>8.3f} {drafter:>8.3f}"
        )
    print(json.dumps({"strategies": figures, "token_budget": config.batching.token_budget}))


if __name__ == "__main__":
    main()
