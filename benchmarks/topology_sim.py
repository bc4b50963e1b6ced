"""How many ranks should capture and how many should train: a real plan, run on paper for 8, 64 and 512 GPUs.

    python benchmarks/topology_sim.py             # tables for an 8B target; constants of dflash_core.batching.cost
    python benchmarks/topology_sim.py --check     # first runs 1 to 4 processes with artificial delays against it

Claims: (1) throughput against the number of target ranks, and the best split, follow from the plan and the
seconds of a microbatch; (2) the bandwidth between ranks below which transfers take over; (3) the timeline
agrees with processes that really capture, send and train within 10%.

The delays of `--check` are floors: a rank that needs less sleeps for the rest, so each capture and each
training takes what the timeline assumes. It ends with an error where a run is more than 10% off. Steps hold four
microbatches a GPU: with one, 6 of 8 drafter ranks would wait while the 2 that got a second one work. Prints tables,
then one line of JSON.
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

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timeline import Rates, Timeline, simulate  # noqa: E402
from dflash_core.batching.cost import REFERENCE, CostModel  # noqa: E402
from dflash_core.batching.plan import build_plan  # noqa: E402
from dflash_core.config import BatchingConfig, TrainingConfig  # noqa: E402
from dflash_core.dataflow.assignment import Assignment
from dflash_core.dataflow.schedule import Schedule  # noqa: E402
from dflash_core.launch.layout import make_layout  # noqa: E402

TOKEN_BUDGET, NUM_ANCHORS, BLOCK_SIZE = 49_152, 512, 16
FEATURE_BYTES = 5 * 4096 * 2  # a token: 5 layers, width 4,096, bfloat16
STEP_SECONDS = 0.15  # reduction of 1e9 fp32 gradients over NVLink, and the update
GPUS_A_NODE = 8
PER_STEP = 4  # microbatches a GPU and step


class PaperSchedule:
    """A plan without a token store: what assignments need of `Schedule`."""

    def __init__(self, plan: Any) -> None:
        self._plan, self.total_steps = plan, plan.num_steps

    def locate(self, step: int) -> tuple[int, int]:
        return 0, step

    def plan(self, epoch: int) -> Any:
        return self._plan


def paper_schedule(num_gpus: int, num_steps: int, seed: int = 0) -> Schedule:
    """Log-normal lengths (median 900, up to 8,192), packed, `PER_STEP` microbatches a GPU and step."""
    rng = np.random.default_rng(seed)
    mean = 1250
    lengths = rng.lognormal(
        np.log(900), 0.8, int(PER_STEP * num_gpus * num_steps * TOKEN_BUDGET / mean)
    ).clip(32, 8192)
    slots = np.minimum(lengths * 0.6, NUM_ANCHORS).astype(np.int32) * BLOCK_SIZE
    config = BatchingConfig(
        token_budget=TOKEN_BUDGET, tokens_per_step=int(PER_STEP * num_gpus * TOKEN_BUDGET * 0.98)
    )
    plan = build_plan(lengths.astype(np.int32), config, seed=seed, epoch=0, draft_slots=slots)
    return cast(Schedule, PaperSchedule(plan))


# What 8 GPUs of the seed project did with 7 targets and 1 drafter, when padding cost a third of the slots and
# less: about 31,000 slots/s, the targets being the bottleneck. So a target rank captures 4,400 slots/s, and
# the drafter rank keeps up with 31,000 tokens/s.
SEED_PROJECT = CostModel(
    capture_slot=7 / 31_000,
    capture_pair=0.0,
    capture_microbatch=0.0,
    train_token=1 / 32_000,
    train_draft_slot=0.0,
    train_draft_pair=0.0,
    train_microbatch=0.0,
)
MODELS = {"8B target, constants of the cost model": REFERENCE, "rates of the seed project": SEED_PROJECT}


def paper_rates(schedule: Schedule, model: CostModel, gigabytes_per_second: float) -> Rates:
    """Seconds of a cost model for the plan's microbatches."""
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
    """`num_targets` of every node's GPUs capture; 0 is colocated."""
    nodes = max(1, num_gpus // GPUS_A_NODE)
    if num_targets == 0:
        return TrainingConfig(num_drafter_ranks=num_gpus, num_nodes=nodes)
    return TrainingConfig(
        topology="split",
        num_target_ranks=num_targets * nodes,
        num_drafter_ranks=num_gpus - num_targets * nodes,
        num_nodes=nodes,
    )


def paper(name_of_model: str, num_gpus: int, num_steps: int) -> dict[str, Any]:
    """Throughput by split, and by bandwidth for the best split."""
    schedule = paper_schedule(num_gpus, num_steps)
    tokens = int(schedule.plan(0).tokens.sum())

    def tokens_per_second(num_targets: int, bandwidth: float) -> tuple[float, Timeline]:
        layout = make_layout(split_config(num_gpus, num_targets))
        rates = paper_rates(schedule, MODELS[name_of_model], bandwidth)
        timeline = simulate(
            layout, schedule, rates, steps=range(min(num_steps, schedule.total_steps)), max_inflight=2
        )
        steps = tokens * num_steps / schedule.total_steps
        return steps / timeline.seconds, timeline

    print(f"\n{name_of_model}: {num_gpus} GPUs, {num_steps} steps, 50 GB/s between ranks")
    print(f"{'targets+drafters a node':<26}{'tokens/s':>12}{'targets busy':>14}{'drafters busy':>15}")
    by_split = {}
    for num_targets in range(GPUS_A_NODE):
        speed, timeline = tokens_per_second(num_targets, 50)
        name = f"{num_targets}+{GPUS_A_NODE - num_targets}" if num_targets else "colocated"
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
DELAYS = {"capture": 0.006, "train": 0.004}  # seconds a token


def check() -> dict[str, Any]:
    """Real processes whose captures and trainings take given times, beside the timeline of the same plan."""
    from benchmarks.support.tiny_target import make_tiny_target
    from dflash_core.training.run import Run
    from tests.injected_faults import slow_work
    from tests.ranks import run_ranks
    from tests.training_run import read_metrics, write_run

    os.environ["OMP_NUM_THREADS"] = "1"
    out = {}
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
            run = Run.load(run_dir / "run.json")
            schedule = run.open_schedule(run.open_store())
            timeline = simulate(
                make_layout(config.training),
                schedule,
                Rates(
                    capture=lambda a, s=schedule: delay(s, a, "capture"),
                    train=lambda a, s=schedule: delay(s, a, "train"),
                    transfer=lambda a: 0.0,
                    step=0.0,
                ),
                steps=range(schedule.total_steps),
                max_inflight=config.training.max_inflight_microbatches,
            )
            # The first step has the start of the processes in it.
            measured, expected = times[-1] - times[0], timeline.step_ends[-1] - timeline.step_ends[0]
            out[name] = {"measured": measured, "timeline": expected, "ratio": measured / expected}
            print(f"{name:<14}{measured:>12.2f}{expected:>12.2f}{measured / expected:>8.3f}")
    return out


def delay(schedule: Schedule, assignment: Assignment, kind: str) -> float:
    """Seconds that this piece of work is made to take."""
    return float(schedule.plan(assignment.epoch).tokens[assignment.microbatch] * DELAYS[kind])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="run processes with artificial delays as well")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"check": check()} if arguments.check else {}
    sizes = ((8, 40), (64, 10), (512, 4))
    result["paper"] = [paper(name, gpus, steps) for name in MODELS for gpus, steps in sizes]
    print(json.dumps(result))
    off = [name for name, found in result.get("check", {}).items() if abs(found["ratio"] - 1) > 0.1]
    sys.exit(f"more than 10% off: {', '.join(off)}" if off else 0)


if __name__ == "__main__":
    main()
