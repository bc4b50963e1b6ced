"""Best split into target and drafter ranks: the simulated timeline of a real plan on 8, 64 and 512 GPUs.

    python -m benchmarks.topology_sim             # tables for an 8B target, by the cost model
    python -m benchmarks.topology_sim --check     # first compares 1 to 4 processes with artificial delays

Claims: (1) throughput against the number of target ranks, and the best split, follow from the plan and the
seconds of a microbatch; (2) so does the bandwidth between ranks below which transfers are the bottleneck; (3)
the timeline agrees within 10% with processes that really capture, send and train.

The delays of `--check` are minima: a rank that needs less sleeps for the rest, so each capture and each
training takes the time that the timeline assumes. The command fails if a run differs by more than 10%. Steps
hold four microbatches per GPU: with one, 6 of 8 drafter ranks would wait while the 2 with a second one work.
Prints tables, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.timeline import Rates, Timeline, simulate
from dflash_core.batching.cost import REFERENCE, CostModel
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig, TrainingConfig
from dflash_core.dataflow.assignment import Assignment
from dflash_core.dataflow.schedule import Schedule
from dflash_core.launch.layout import make_layout

TOKEN_BUDGET, NUM_ANCHORS, BLOCK_SIZE = 49_152, 512, 16
FEATURE_BYTES = 5 * 4096 * 2  # per token: 5 layers, width 4,096, bfloat16
STEP_SECONDS = 0.15  # reduction of 1e9 fp32 gradients over NVLink, and the update
GPUS_PER_NODE = 8
PER_STEP = 4  # microbatches per GPU and step


class PlanSchedule:
    """A plan without a token store, with the part of `Schedule` that assignments need."""

    def __init__(self, plan: Any) -> None:
        self._plan, self.total_steps = plan, plan.num_steps

    def locate(self, step: int) -> tuple[int, int]:
        return 0, step

    def plan(self, epoch: int) -> Any:
        return self._plan


def simulated_schedule(num_gpus: int, num_steps: int, seed: int = 0) -> Schedule:
    """Build a packed plan of log-normal lengths (median 900, at most 8,192), `PER_STEP` per GPU and step."""
    rng = np.random.default_rng(seed)
    mean_length = 1250
    num_samples = int(PER_STEP * num_gpus * num_steps * TOKEN_BUDGET / mean_length)
    lengths = rng.lognormal(np.log(900), 0.8, num_samples).clip(32, 8192)
    slots = np.minimum(lengths * 0.6, NUM_ANCHORS).astype(np.int32) * BLOCK_SIZE
    config = BatchingConfig(
        token_budget=TOKEN_BUDGET, tokens_per_step=int(PER_STEP * num_gpus * TOKEN_BUDGET * 0.98)
    )
    plan = build_plan(lengths.astype(np.int32), config, seed=seed, epoch=0, draft_slots=slots)
    return cast(Schedule, PlanSchedule(plan))


# A slower setup: 8 GPUs with 7 targets and 1 drafter reach about 31,000 slots/s, and the targets are the
# bottleneck. So a target rank captures 4,400 slots/s, and the drafter rank sustains 31,000 tokens/s.
SLOW_TARGETS = CostModel(
    capture_slot=7 / 31_000,
    capture_pair=0.0,
    capture_microbatch=0.0,
    train_token=1 / 32_000,
    train_draft_slot=0.0,
    train_draft_pair=0.0,
    train_microbatch=0.0,
)
MODELS = {"8B target, constants of the cost model": REFERENCE, "4,400 slots/s per target rank": SLOW_TARGETS}


def simulated_rates(schedule: Schedule, model: CostModel, gigabytes_per_second: float) -> Rates:
    """Return the seconds of a cost model for the plan's microbatches."""
    plan = schedule.plan(0)
    parts = model.parts(plan.work)
    capture = sum(seconds for name, seconds in parts.items() if name.startswith("capture"))
    train = sum(seconds for name, seconds in parts.items() if name.startswith("train"))
    return Rates(
        capture=lambda a: float(capture[a.microbatch]),
        train=lambda a: float(train[a.microbatch]),
        transfer=lambda a: plan.tokens[a.microbatch] * FEATURE_BYTES / (gigabytes_per_second * 1e9),
        step=STEP_SECONDS,
    )


def split_config(num_gpus: int, num_targets: int) -> TrainingConfig:
    """Return settings in which `num_targets` GPUs of every node capture; 0 is colocated."""
    nodes = max(1, num_gpus // GPUS_PER_NODE)
    if num_targets == 0:
        return TrainingConfig(num_drafter_ranks=num_gpus, num_nodes=nodes)
    return TrainingConfig(
        topology="split",
        num_target_ranks=num_targets * nodes,
        num_drafter_ranks=num_gpus - num_targets * nodes,
        num_nodes=nodes,
    )


def simulate_splits(name_of_model: str, num_gpus: int, num_steps: int) -> dict[str, Any]:
    """Print and return the throughput by split, and by bandwidth for the best split."""
    schedule = simulated_schedule(num_gpus, num_steps)
    tokens = int(schedule.plan(0).tokens.sum())

    def tokens_per_second(num_targets: int, bandwidth: float) -> tuple[float, Timeline]:
        layout = make_layout(split_config(num_gpus, num_targets))
        rates = simulated_rates(schedule, MODELS[name_of_model], bandwidth)
        timeline = simulate(
            layout, schedule, rates, steps=range(min(num_steps, schedule.total_steps)), max_inflight=2
        )
        steps = tokens * num_steps / schedule.total_steps
        return steps / timeline.seconds, timeline

    print(f"\n{name_of_model}: {num_gpus} GPUs, {num_steps} steps, 50 GB/s between ranks")
    print(f"{'targets+drafters per node':<26}{'tokens/s':>12}{'targets busy':>14}{'drafters busy':>15}")
    by_split = {}
    for num_targets in range(GPUS_PER_NODE):
        speed, timeline = tokens_per_second(num_targets, 50)
        name = f"{num_targets}+{GPUS_PER_NODE - num_targets}" if num_targets else "colocated"
        by_split[name] = speed
        print(f"{name:<26}{speed:>12,.0f}{timeline.target_busy:>14.0%}{timeline.drafter_busy:>15.0%}")
    best = max((n for n in by_split if n != "colocated"), key=lambda n: by_split[n])
    by_bandwidth = {b: tokens_per_second(int(best[0]), b)[0] for b in (1, 2, 5, 10, 25, 50, 100)}
    limit = min(b for b, speed in by_bandwidth.items() if speed > 0.95 * by_bandwidth[100])
    shown = ", ".join(f"{b} GB/s {speed:,.0f}" for b, speed in by_bandwidth.items())
    print(f"best split {best}; by bandwidth: {shown}; transfers cost over 5% below {limit} GB/s")
    return {
        "model": name_of_model,
        "gpus": num_gpus,
        "tokens_per_second": by_split,
        "best_split": best,
        "colocated_over_best_split": by_split["colocated"] / by_split[best],
        "bandwidth_needed_gb_per_second": limit,
    }


CHECKED = {
    "colocated 1": {},
    "colocated 2": {"num_drafter_ranks": 2},
    "split 1+1": {"topology": "split"},
    "split 2+1": {"topology": "split", "num_target_ranks": 2},
    "split 1+2": {"topology": "split", "num_drafter_ranks": 2},
    "split 2+2": {"topology": "split", "num_target_ranks": 2, "num_drafter_ranks": 2},
}
DELAYS = {"capture": 0.006, "train": 0.004}  # seconds per token


def check() -> dict[str, Any]:
    """Compare processes whose captures and trainings take given times with the timeline of the same plan."""
    from benchmarks.support.ranks import run_ranks, slow_work
    from benchmarks.support.tiny_run import read_metrics, write_run
    from benchmarks.support.tiny_target import make_tiny_target
    from dflash_core.training.run import RunSpec

    os.environ["OMP_NUM_THREADS"] = "1"
    results = {}
    print(f"{'processes':<14}{'measured s':>12}{'timeline s':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        target = make_tiny_target(root / "target")
        for name, settings in CHECKED.items():
            training = {"epochs": 1, "max_steps": 10, "validate_every": 1000, "checkpoint_every_steps": 1000}
            changes = {"training": {**training, "num_validation_samples": 1, **settings}}
            run_dir, config = write_run(root, target, changes, name=name.replace(" ", "-"))
            run_ranks(run_dir, config, partial(slow_work, seconds=DELAYS))
            times = [line["time_ms"] / 1000 for line in read_metrics(run_dir).values()]
            run = RunSpec.load(run_dir / "run.json")
            schedule = run.open_schedule(run.open_store())
            rates = Rates(
                capture=lambda a, s=schedule: delay(s, a, "capture"),
                train=lambda a, s=schedule: delay(s, a, "train"),
                transfer=lambda a: 0.0,
                step=0.0,
            )
            layout, steps = make_layout(config.training), range(schedule.total_steps)
            max_inflight = config.training.max_inflight_microbatches
            timeline = simulate(layout, schedule, rates, steps=steps, max_inflight=max_inflight)
            # Without the first step, which includes the start of the processes.
            measured, expected = times[-1] - times[0], timeline.step_ends[-1] - timeline.step_ends[0]
            results[name] = {"measured": measured, "timeline": expected, "ratio": measured / expected}
            print(f"{name:<14}{measured:>12.2f}{expected:>12.2f}{measured / expected:>8.3f}")
    return results


def delay(schedule: Schedule, assignment: Assignment, kind: str) -> float:
    """Return the artificial duration of a piece of work."""
    return float(schedule.plan(assignment.epoch).tokens[assignment.microbatch] * DELAYS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="run processes with artificial delays as well")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"check": check()} if arguments.check else {}
    sizes = ((8, 40), (64, 10), (512, 4))
    result["paper"] = [simulate_splits(name, gpus, steps) for name in MODELS for gpus, steps in sizes]
    print(json.dumps(result))
    off = [name for name, run in result.get("check", {}).items() if abs(run["ratio"] - 1) > 0.1]
    sys.exit(f"more than 10% off: {', '.join(off)}" if off else 0)


if __name__ == "__main__":
    main()
