"""From lengths to edges, plans and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_core.batching.cost import CostModel, predict
from dflash_core.config import STRATEGIES, RunConfig
from dflash_core.errors import UserError
from flows.runtime.deployments import FlowOptions
from flows.steps.common import Dataset, Pointer, root_of, target_directory
from tasks import advice, buckets, length_profile, plans, report
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting import tables


def edges(config: RunConfig, options: FlowOptions, profile_pointer: Pointer) -> Pointer:
    """Bucket edges for this histogram, budget and number of buckets."""
    longest = profile_pointer["stats"]["max_length"]
    if longest > config.batching.token_budget:
        raise UserError(
            f"batching.token_budget: {config.batching.token_budget} slots is less than the longest sample's "
            f"{longest} tokens; allowed: at least that, or a lower data.max_length"
        )
    directory = root_of(config) / profile_pointer["path"]
    pointer = buckets.bucket_edges(
        root_of(config),
        label=f"bucket edges, {config.batching.num_buckets} buckets",
        after=[profile_pointer],
        refresh="edges" in options.refresh,
        **buckets.edges_inputs(profile_pointer, config.batching),
        profile_directory=str(directory),
    )
    found, expected = length_profile.read_profile(directory), pointer["expected_efficiency"]
    artifacts.table(
        "edges",
        config.deployment,
        artifacts.bucket_rows(found["lengths"], found["counts"], pointer["edges"]),
        "training samples in each bucket"
        + (f"; expected padding efficiency {expected:.4f}" if expected is not None else "")
        + f"; more than {pointer['knee']} buckets gain little",
    )
    return pointer


def make_plans(
    config: RunConfig,
    options: FlowOptions,
    dataset: Dataset,
    edges_pointer: Pointer,
    strategies: Sequence[str] = STRATEGIES,
    all_epochs: bool = False,
) -> dict[str, list[Pointer]]:
    """Plans of each strategy, one task an epoch: all epochs of the run's own, two of the others.

    Args:
        all_epochs: all epochs of every strategy, to train each.
    """
    lengths = plans.lengths_of(config, dataset.shards)
    arguments = {
        "shards": dataset.shards,
        "validation_share": config.data.validation_share,
        "min_validation": config.data.min_validation_samples,
        "num_anchors": config.objective.num_anchors,
        "block_size": config.drafter.block_size,
    }
    calls, strategy_of_call = [], []
    for strategy in strategies:
        batching = replace(config.batching, strategy=strategy)  # type: ignore[arg-type]
        settings = plans.plan_settings(batching, edges_pointer["edges"])
        own = all_epochs or strategy == config.batching.strategy
        num_epochs = max(config.training.epochs if own else 0, plans.COMPARED_EPOCHS)
        strategy_of_call += [strategy] * num_epochs
        calls += [
            {
                "label": f"plan {strategy} epoch {epoch}",
                "after": [edges_pointer] if strategy == "bucketed" else dataset.pointers[:1],
                "lengths_digest": lengths.digest,
                "settings": settings,
                "seed": config.training.seed,
                "epoch": epoch,
                "arguments": arguments,
            }
            for epoch in range(num_epochs)
        ]
    made: dict[str, list[Pointer]] = {strategy: [] for strategy in strategies}
    found = plans.build_epoch.map(root_of(config), calls, refresh="plan" in options.refresh)
    for strategy, pointer in zip(strategy_of_call, found):
        made[strategy].append(pointer)
    artifacts.table(
        "plans",
        config.deployment,
        artifacts.plan_rows(report.plan_figures(made), report.PLAN_FIGURES),
        f"batch plans of each strategy, seed {config.training.seed}; mixing 1 is as good as random samples",
    )
    return made


def show_plans(
    config: RunConfig, dataset: Dataset, profile_pointer: Pointer, edges_pointer: Pointer, made: Pointer
) -> None:
    """Data and plans in the terminal."""
    figures = report.plan_figures(made)
    stats = report.dataset_figures(
        profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
    )
    tables.print_table(
        f"{config.deployment}: data and plans",
        [
            ("samples, tokens", f"{stats['num_samples']:,}, {stats['num_tokens']:,}"),
            ("rows rejected", f"{stats['num_rejected']:,}"),
            (
                "lengths: median, 99%, longest",
                f"{stats['median_length']}, {stats['p99_length']}, {stats['max_length']}",
            ),
            ("bucket edges", ", ".join(map(str, edges_pointer["edges"]))),
            *(
                (
                    f"{strategy}: efficiency, mixing in a step",
                    f"{f['padding_efficiency']:.4f}, {f['mixing_step']:.2f}",
                )
                for strategy, f in figures.items()
            ),
        ],
    )


def load_plan(config: RunConfig, pointer: Pointer) -> Any:
    """The `BatchPlan` of a pointer."""
    from dflash_core.batching import BatchPlan

    return BatchPlan.load(root_of(config) / pointer["path"] / f"epoch-{pointer['epoch']:03d}.parquet")


def cost_model(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: Pointer,
    dataset: Dataset,
    *,
    measure: bool = True,
) -> tuple[CostModel, str]:
    """What a microbatch costs, and where the constants come from."""
    directory = target_directory(config, target_pointer)
    if not measure:
        return advice.shape_model(directory, config), "from shapes and an assumed speed of the device"
    pointer = advice.calibrate(
        root_of(config),
        label="calibrate",
        after=[target_pointer, *dataset.pointers],
        refresh="calibrate" in options.refresh,
        **advice.calibration_inputs(
            config,
            target_fingerprint=target_pointer["fingerprint"],
            dataset_digest=dataset.digest,
            target=directory,
            shards=dataset.shards,
        ),
    )
    basis = f"calibrated on {pointer['num_microbatches']} microbatches measured here"
    return CostModel(**pointer["constants"]), basis


def predict_seconds(config: RunConfig, epochs: Sequence[Pointer], model: CostModel) -> float | None:
    """Seconds of capture and drafter that the epochs of a run should take on one process; None for a run that
    captures once and trains often, or ends early.
    """
    if config.target.cache != "none" or config.training.max_steps is not None:
        return None
    used = [load_plan(config, pointer) for pointer in epochs[: config.training.epochs]]
    return sum(predict(plan.work, model).seconds for plan in used)


def forecast(config: RunConfig, dataset: Dataset, edges_pointer: Pointer, model: CostModel) -> list[Any]:
    """Each strategy on these lengths, fastest first."""
    from dflash_core.batching.advice import forecast_strategies

    lengths = plans.lengths_of(config, dataset.shards)
    return forecast_strategies(
        lengths.lengths,
        replace(config.batching, edges=tuple(edges_pointer["edges"])),
        draft_slots=lengths.draft_slots,
        source_id=lengths.source_id,
        model=model,
        epochs=config.training.epochs,
        num_devices=config.training.num_drafter_ranks,
        seed=config.training.seed,
    )
