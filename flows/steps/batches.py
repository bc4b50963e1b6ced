"""Steps from lengths to bucket edges, batch plans and their predicted cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_core.batching.cost import CostModel, predict
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import RunConfig, check_budget
from flows.runtime.deployments import FlowOptions
from tasks import advice, buckets, length_profile, plans, report
from tasks.reporting import prefect_artifacts as artifacts
from tasks.reporting import report_tables, tables
from tasks.storage.pointers import (
    Dataset,
    EdgesPointer,
    PlanPointer,
    ProfilePointer,
    TargetPointer,
    root_of,
    target_directory,
)

if TYPE_CHECKING:
    from dflash_core.batching.advice import Forecast


def edges(config: RunConfig, options: FlowOptions, profile_pointer: ProfilePointer) -> EdgesPointer:
    """Compute the bucket edges for this histogram, budget and number of buckets."""
    check_budget(config.batching.token_budget, longest=profile_pointer["stats"]["max_length"])
    directory = root_of(config) / profile_pointer["path"]
    pointer = buckets.bucket_edges(
        root_of(config),
        label=f"bucket edges, {config.batching.num_buckets} buckets",
        after=[profile_pointer],
        refresh="edges" in options.refresh,
        **buckets.edges_inputs(profile_pointer, config.batching),
        profile_directory=str(directory),
    )
    histogram, expected = length_profile.read_profile(directory), pointer["expected_efficiency"]
    efficiency = "" if expected is None else f"; expected padding efficiency {expected:.4f}"
    artifacts.table(
        "edges",
        config.deployment,
        report_tables.bucket_rows(histogram["lengths"], histogram["counts"], pointer["edges"]),
        f"training samples in each bucket{efficiency}; more than {pointer['knee']} buckets gain little",
    )
    return pointer


def make_plans(
    config: RunConfig,
    options: FlowOptions,
    dataset: Dataset,
    edges_pointer: EdgesPointer,
    *,
    strategies: Sequence[str] = tuple(STRATEGIES),
    all_epochs: bool = False,
) -> dict[str, list[PlanPointer]]:
    """Plan each strategy, one task per epoch: all epochs of the run's own strategy, two of the others.

    Args:
        config: the run.
        options: stages to refresh.
        dataset: samples to plan for.
        edges_pointer: bucket edges, for the strategies that use them.
        strategies: names of the strategies.
        all_epochs: plan all epochs of every strategy, to train each.

    Returns:
        Strategy -> one pointer per epoch.
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
        batching = replace(config.batching, strategy=strategy)
        settings = plans.plan_settings(batching, edges_pointer["edges"])
        own = all_epochs or strategy == config.batching.strategy
        num_epochs = max(config.training.epochs if own else 0, plans.COMPARED_EPOCHS)
        strategy_of_call += [strategy] * num_epochs
        calls += [
            {
                "label": f"plan {strategy} epoch {epoch}",
                "after": [edges_pointer] if STRATEGIES[strategy].uses_edges else dataset.pointers[:1],
                "lengths_digest": lengths.digest,
                "settings": settings,
                "seed": config.training.seed,
                "epoch": epoch,
                "arguments": arguments,
            }
            for epoch in range(num_epochs)
        ]
    plan_pointers: dict[str, list[PlanPointer]] = {strategy: [] for strategy in strategies}
    pointers = plans.build_epoch.map(root_of(config), calls, refresh="plan" in options.refresh)
    for strategy, pointer in zip(strategy_of_call, pointers):
        plan_pointers[strategy].append(pointer)
    artifacts.table(
        "plans",
        config.deployment,
        report_tables.plan_rows(report.plan_figures(plan_pointers), report_tables.PLAN_FIGURES),
        f"batch plans of each strategy, seed {config.training.seed}; mixing 1 is as good as random samples",
    )
    return plan_pointers


def show_plans(
    config: RunConfig,
    dataset: Dataset,
    profile_pointer: ProfilePointer,
    edges_pointer: EdgesPointer,
    plan_pointers: dict[str, list[PlanPointer]],
) -> None:
    """Print data and plans in the terminal."""
    stats = report.dataset_figures(
        profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
    )
    lengths = f"{stats['median_length']}, {stats['p99_length']}, {stats['max_length']}"
    rows = [
        ("samples, tokens", f"{stats['num_samples']:,}, {stats['num_tokens']:,}"),
        ("rows rejected", f"{stats['num_rejected']:,}"),
        ("rows over data.max_length, tokens lost by it", report_tables.over_length_text(stats)),
        ("lengths: median, 99%, longest", lengths),
        ("bucket edges", ", ".join(map(str, edges_pointer["edges"]))),
    ]
    for strategy, figures in report.plan_figures(plan_pointers).items():
        text = f"{figures['padding_efficiency']:.4f}, {figures['mixing_step']:.2f}"
        rows.append((f"{strategy}: efficiency, mixing in a step", text))
    tables.print_table(f"{config.deployment}: data and plans", rows)


def cost_model(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: TargetPointer,
    dataset: Dataset,
    *,
    measure: bool = True,
) -> tuple[CostModel, str]:
    """Return the cost model of a microbatch, and the source of its constants in words."""
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


def predict_seconds(config: RunConfig, epochs: Sequence[PlanPointer], model: CostModel) -> float | None:
    """Predict the seconds of capture and drafter of a run's epochs on one process.

    Returns:
        None for a run that captures once and trains often, or that ends early.
    """
    training = config.training
    if config.target.cache != "none" or training.max_steps is not None or training.max_minutes is not None:
        return None
    used = [plans.load_plan(config, pointer) for pointer in epochs[: config.training.epochs]]
    return sum(predict(plan.work, model).seconds for plan in used)


def forecast(
    config: RunConfig, dataset: Dataset, edges_pointer: EdgesPointer, model: CostModel
) -> list[Forecast]:
    """Forecast each strategy on these lengths, fastest first."""
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
