"""Effect of changes to the training recipe: variations of one run, trained on the same captured states.

    python -m flows.train_dflash quickstart                                  # once: data, plans and run.json
    python -m benchmarks.recipes runs/quickstart/latest                      # every variation
    python -m benchmarks.recipes runs/quickstart/latest decay dpace --seeds 2 --steps 300
    python -m benchmarks.recipes runs/quickstart/latest decay "block of 8 + 8 anchors"  # both changes at once

Each variation takes the run's own steps: the same samples, anchors, labels and learning rates, with initial
weights and anchors of the seed. It is measured on the run's validation samples with every eligible position
as an anchor: simulated acceptance length (1 + leading slots that are the target's own argmax) and loss, both
with the same weights and labels for all, so that columns are comparable (the loss not between block sizes).
The 95% interval draws samples (percentile bootstrap, means over the seeds); the difference to the first
variation is paired by sample. The interval does not include the variation between seeds: the figures of each
seed are printed next to it.

States are captured once into DIR (--captures), a few minutes on two cores; a variation of 300 steps of the
quickstart takes about two. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.config import ObjectiveConfig
from dflash_core.dataflow.capture_cache import make_capture
from dflash_core.dataflow.schedule import Schedule, build_microbatch, validation_rows
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.initial_weights import start_from_target
from dflash_core.drafter.shape import drafter_shape
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings, LossSums, TargetEnds, microbatch_loss
from dflash_core.target.capture import Capture, TargetCapture
from dflash_core.target.compute_dtype import resolve_dtype
from dflash_core.target.materialise import fingerprint
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target
from dflash_core.training.optim import Gradients, build_optimizer, learning_rate
from dflash_core.training.run import RunSpec, layer_ids, load_target_config

RESAMPLES = 10_000


@dataclass(frozen=True)
class Variation:
    """Changes to the run's own settings."""

    objective: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    first_weights: str = "random"  # of TrainingConfig


VARIATIONS = {
    "decay": Variation(objective={"weighting": "decay"}),
    "dpace": Variation(objective={"weighting": "dpace"}),
    "dpace, alpha 0.8": Variation(objective={"weighting": "dpace", "dpace_alpha": 0.8}),
    "kl": Variation(objective={"loss": "kl"}),
    "labels of the data": Variation(objective={"labels": "data", "stop_at_disagreement": False}),
    "no stop at disagreement": Variation(objective={"stop_at_disagreement": False}),
    "weights of the target": Variation(first_weights="target"),
    "two layers": Variation(drafter={"num_layers": 2}),
    "half the learning rate": Variation(optimizer={"lr": 0.001}),
    "twice the learning rate": Variation(optimizer={"lr": 0.004}),
    "block of 4": Variation(drafter={"block_size": 4}),
    "block of 8": Variation(drafter={"block_size": 8}),
    "8 anchors": Variation(objective={"num_anchors": 8}),
    "16 anchors": Variation(objective={"num_anchors": 16}),
}


def variation_of(name: str) -> Variation:
    """Return one of `VARIATIONS`, or several joined by " + "; a later one wins."""
    parts = [VARIATIONS[part] for part in name.split(" + ")]
    changes = {
        key: {k: v for part in parts for k, v in getattr(part, key).items()}
        for key in ("objective", "drafter", "optimizer")
    }
    first_weights = [part.first_weights for part in parts if part.first_weights != "random"]
    return Variation(**changes, first_weights=first_weights[-1] if first_weights else "random")


@dataclass(frozen=True)
class Bench:
    """Data and models that all variations share."""

    run: RunSpec
    schedule: Schedule
    target: Target
    ends: TargetEnds
    capture: Capture
    # (microbatch, features), one sample each, every eligible position an anchor
    validation: list[tuple[Microbatch, Features]]
    steps: int

    def loss_settings(self, objective: ObjectiveConfig) -> LossSettings:
        mask_token_id = self.run.config.drafter.mask_token_id
        assert mask_token_id is not None
        slots = self.run.config.training.max_draft_slots
        return LossSettings(self.ends, objective, mask_token_id, slots, self.target.device)


def prepare(run: RunSpec, captures: Path, steps: int | None) -> Bench:
    """Capture (or find) the states of all samples, with labels and last hidden states for every objective."""
    config = run.config
    schedule = Schedule(run.open_store(), run.plans, steps)
    target_config = load_target_config(run)
    ids = layer_ids(run, target_config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compute = resolve_dtype(config.target.compute_dtype, device)
    feature = compute if config.target.feature_dtype == "auto" else resolve_dtype(config.target.feature_dtype)
    target = Target.load(
        run.target, layer_ids=ids, device=device, compute_dtype=compute, feature_dtype=feature
    )
    objective = replace(config.objective, labels="target", loss="kl")
    width = target_config.get_text_config().hidden_size
    spec = FeatureSpec.of(objective, layers=len(ids), width=width, feature_dtype=feature, compute=compute)
    on_disk = replace(config.target, cache="disk")
    digest = fingerprint(run.target)
    capture, line = make_capture(target, on_disk, objective, schedule, spec, captures, digest)
    print(line, flush=True)
    alone = TargetCapture(target, objective)
    validation = []
    for row in validation_rows(schedule.store, config.training.num_validation_samples):
        microbatch = build_microbatch(
            schedule.store, np.array([row], dtype=np.int32), 0, num_anchors=1 << 30, seed=0, epoch=0
        )
        validation.append((microbatch, alone(microbatch)))
    dtype = resolve_dtype(config.training.compute_dtype, device)
    ends = TargetEnds(target.embed_weight.to(dtype), target.head_weight.to(dtype))
    return Bench(run, schedule, target, ends, capture, validation, schedule.total_steps)


def train(bench: Bench, variation: Variation, seed: int) -> DFlashDrafter:
    """Train one drafter from its initial weights to the end of the schedule."""
    config, schedule = bench.run.config, bench.schedule
    objective = replace(config.objective, **variation.objective)
    optimizer_config = replace(config.optimizer, **variation.optimizer)
    shape = drafter_shape(
        read_shape(bench.target.config),
        replace(config.drafter, **variation.drafter),
        tuple(bench.target.layer_ids),
    )
    drafter = DFlashDrafter(shape, torch.Generator().manual_seed(seed)).to(bench.target.device)
    if variation.first_weights == "target":
        start_from_target(drafter, bench.run.target, bench.target.model)
    gradients, optimizer = Gradients(drafter.parameters()), build_optimizer(drafter, optimizer_config)
    loss_settings = bench.loss_settings(objective)
    for step in range(bench.steps):
        gradients.zero()
        sums = LossSums.zeros(shape.block_size, bench.target.device)
        epoch, local = schedule.locate(step)
        first, end = schedule.plan(epoch).step_offsets[local : local + 2]
        for number in range(int(first), int(end)):
            rows, width = schedule.rows(epoch, number)
            microbatch = build_microbatch(
                schedule.store, rows, width, num_anchors=objective.num_anchors, seed=seed, epoch=epoch
            )
            sums = sums + microbatch_loss(
                drafter, microbatch, bench.capture(microbatch), loss_settings, backward=True
            )
        gradients.normalise(float(sums.weight_sum) or 1.0, optimizer_config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, bench.steps, optimizer_config)
        optimizer.step()
    return drafter


def measure(bench: Bench, drafter: DFlashDrafter) -> tuple[np.ndarray, np.ndarray]:
    """Measure a drafter on the validation samples.

    Returns:
        [n, 4]: accepted slots, blocks, weighted loss and weight of each sample; [2, K]: correct and
        supervised slots by position.
    """
    objective = ObjectiveConfig(labels="target", stop_at_disagreement=True)
    loss_settings, parts = bench.loss_settings(objective), []
    for microbatch, features in bench.validation:
        parts.append(microbatch_loss(drafter, microbatch, features, loss_settings, backward=False))
    fields = ("accepted_sum", "num_blocks", "loss_sum", "weight_sum")
    samples = np.array([[float(getattr(s, name)) for name in fields] for s in parts])
    total = sum(parts[1:], parts[0])
    return samples, torch.stack([total.correct_K, total.count_K]).cpu().numpy()


def interval(values: np.ndarray) -> list[float]:
    """Return the 2.5% and 97.5% quantiles."""
    return [float(x) for x in np.quantile(values, [0.025, 0.975])]


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments; unknown variations end the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("names", nargs="*", metavar="VARIATION", help=", ".join(VARIATIONS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None, help="instead of all of the run's")
    parser.add_argument("--captures", type=Path, default=None, help="default: the run's own place for states")
    args = parser.parse_args()
    args.names = args.names or list(VARIATIONS)
    if unknown := [part for name in args.names for part in name.split(" + ") if part not in VARIATIONS]:
        parser.error(f"{unknown[0]!r} is not a variation; allowed: {', '.join(VARIATIONS)}")
    return args


def compare(bench: Bench, names: list[str], num_seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each variation, with the interval of its difference to the first one."""
    num_samples = len(bench.validation)
    uniform = np.full(num_samples, 1 / num_samples)
    weights = np.random.default_rng(0).multinomial(num_samples, uniform, size=RESAMPLES)
    first = None
    for name in names:
        seconds, runs, correct = 0.0, [], np.zeros(())
        for seed in range(num_seeds):
            started = time.monotonic()
            drafter = train(bench, variation_of(name), seed)
            seconds += time.monotonic() - started
            samples, positions = measure(bench, drafter)
            runs.append(samples)
            correct = correct + positions
        mean = np.mean(runs, axis=0)
        accepted = 1 + weights @ mean[:, 0] / (weights @ mean[:, 1])
        first = accepted if first is None else first
        yield {
            "variation": name,
            "acceptance_length": 1 + float(mean[:, 0].sum() / mean[:, 1].sum()),
            "interval": interval(accepted),
            "difference_interval": interval(accepted - first),
            "loss": float(mean[:, 2].sum() / mean[:, 3].sum()),
            "accuracy_by_position": (correct[0] / np.maximum(correct[1], 1))[1:].round(4).tolist(),
            "seconds_per_step": seconds / bench.steps / num_seeds,
            "by_seed": [1 + float(r[:, 0].sum() / r[:, 1].sum()) for r in runs],
        }


def table_row(result: dict[str, Any], first: dict[str, Any]) -> str:
    """Return a row of the table."""
    difference = result["acceptance_length"] - first["acceptance_length"]
    low, high = result["difference_interval"]
    return (
        f"{result['variation']:<46}{result['acceptance_length']:>11.4f} "
        f"{'{:.4f} to {:.4f}'.format(*result['interval']):<18}{difference:>+9.4f} "
        f"{f'{low:+.4f} to {high:+.4f}':<20}{result['loss']:>7.3f}{result['seconds_per_step']:>8.2f}  "
        f"{' '.join(f'{x:.4f}' for x in result['by_seed'])}"
    )


def main() -> None:
    args = parse_arguments()
    run = RunSpec.load(args.run / "run.json")
    bench = prepare(run, args.captures or run.cache, args.steps)
    print(f"{bench.steps} steps, {len(bench.validation)} validation samples, {args.seeds} seed(s)")
    columns = f"{'':<46}{'acceptance':>11} {'95% interval':<18}{'to first':>9} {'95% interval':<20}"
    print(f"{columns}{'loss':>7}{'s/step':>8}  by seed")
    results: list[dict[str, Any]] = []
    for result in compare(bench, args.names, args.seeds):
        results.append(result)
        print(table_row(result, results[0]), flush=True)
    print(json.dumps({"run": run.run_key, "steps": bench.steps, "seeds": args.seeds, "results": results}))


if __name__ == "__main__":
    main()
