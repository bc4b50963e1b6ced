"""Steps from plans to a trained drafter, and the reports of one run or of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig, to_dict
from flows.runtime.deployments import FlowOptions, data_name
from flows.steps.batches import load_plan
from flows.steps.common import Dataset, root_of, target_directory
from tasks import compare, plans, report, train
from tasks.reporting import report_tables, tables
from tasks.storage.pointers import (
    EdgesPointer,
    EvaluationPointer,
    PlanPointer,
    ProfilePointer,
    TargetPointer,
    TrainedRun,
)


def train_run(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: TargetPointer,
    dataset: Dataset,
    profile_pointer: ProfilePointer,
    epochs: Sequence[PlanPointer],
    label: str | None = None,
) -> TrainedRun:
    """Train to the end, resume, or skip a finished run; `epochs` holds one plan per epoch."""
    root, used = root_of(config), epochs[: config.training.epochs]
    num_steps = sum(int(pointer["metrics"]["num_steps"]) for pointer in used)
    figures = report.dataset_figures(
        profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
    )
    return train.train(
        config,
        {
            "shards": dataset.shards,
            "plans": [
                str(root / pointer["path"] / f"epoch-{pointer['epoch']:03d}.parquet") for pointer in used
            ],
            "target": str(target_directory(config, target_pointer)),
            "dataset_digest": dataset.digest,
            "plan_digests": [pointer["plan_digest"] for pointer in used],
            "target_fingerprint": target_pointer["fingerprint"],
            "total_steps": min(num_steps, config.training.max_steps or num_steps),
            "dataset": {
                "name": data_name(config.data.files),
                "files": sorted(pointer["source"] for pointer in dataset.pointers),
                "profile": figures,
            },
        },
        label=label or f"train {config.batching.strategy}",
        refresh="train" in options.refresh,
        after=[target_pointer, *used],
    )


def write_report(
    config: RunConfig,
    dataset: Dataset,
    profile_pointer: ProfilePointer,
    edges_pointer: EdgesPointer,
    plan_pointers: dict[str, list[PlanPointer]],
    trained: TrainedRun,
    evaluated: EvaluationPointer,
) -> dict[str, Any]:
    """Write report.json, report.md and plots into the run's directory, and print a table."""
    contents = report.write_report(
        config,
        dataset=report.dataset_figures(
            profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
        ),
        edges=edges_pointer,
        plans=plan_pointers,
        trained=trained,
        evaluated=evaluated,
        edges_directory=str(root_of(config) / edges_pointer["path"]),
    )
    title = f"{config.deployment}, run {Path(trained['run_dir']).name} ({trained['status']})"
    rows = [*report_tables.summary_rows(contents), ("report", f"{trained['run_dir']}/report.md")]
    tables.print_table(title, rows)
    return contents


def write_comparison(
    config: RunConfig, dataset: Dataset, edges_pointer: EdgesPointer, results: list[compare.Result]
) -> dict[str, Any]:
    """Write the comparison's report; print its tables and the recommendation."""
    lengths = plans.lengths_of(config, dataset.shards)
    metrics = [
        compare.read_metrics(
            result,
            [load_plan(config, pointer) for pointer in result.plans[: config.training.epochs]],
            lengths,
        )
        for result in results
    ]
    comparison = compare.write_comparison(to_dict(config), results, metrics, edges_pointer["edges"])
    for title, columns in (("throughput and batches", compare.SHOWN), ("training", compare.TRAINED)):
        tables.print_wide_table(f"{config.deployment}: {title}", *compare.table(comparison, columns))
    rows = [("", comparison["recommendation"]), ("report", f"{comparison['directory']}/report.md")]
    tables.print_table("recommendation", rows)
    return comparison
