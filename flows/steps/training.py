"""From plans to a trained drafter, and the reports of one run or of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_core.config import RunConfig, to_dict
from flows.runtime.deployments import FlowOptions, data_name
from flows.steps.batches import load_plan
from flows.steps.common import Dataset, Pointer, root_of, target_directory
from tasks import compare, plans, report, train
from tasks.reporting import tables


def train_run(
    config: RunConfig,
    options: FlowOptions,
    target_pointer: Pointer,
    dataset: Dataset,
    profile_pointer: Pointer,
    epochs: Sequence[Pointer],
    label: str | None = None,
) -> Pointer:
    """Trains to the end, resumes, or skips what is finished; `epochs` are the plans, one an epoch."""
    root, used = root_of(config), epochs[: config.training.epochs]
    num_steps = sum(int(pointer["metrics"]["num_steps"]) for pointer in used)
    return train.train(
        to_dict(config),
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
                "profile": report.dataset_figures(
                    profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
                ),
            },
        },
        label=label or f"train {config.batching.strategy}",
        refresh="train" in options.refresh,
        after=[target_pointer, *used],
    )


def write_report(
    config: RunConfig,
    dataset: Dataset,
    profile_pointer: Pointer,
    edges_pointer: Pointer,
    made: dict[str, list[Pointer]],
    trained: Pointer,
    evaluated: Pointer,
) -> Pointer:
    """report.json, report.md and plots in the run's directory, a table in the terminal."""
    written = report.write_report(
        to_dict(config),
        dataset=report.dataset_figures(
            profile_pointer["stats"], dataset.pointers, num_repeats=dataset.num_repeats
        ),
        edges=edges_pointer,
        plans=made,
        trained=trained,
        evaluated=evaluated,
        edges_directory=str(root_of(config) / edges_pointer["path"]),
    )
    title = f"{config.deployment}, run {Path(trained['run_dir']).name} ({trained['status']})"
    tables.print_table(title, [*report.summary_rows(written), ("report", f"{trained['run_dir']}/report.md")])
    return written


def write_comparison(
    config: RunConfig, dataset: Dataset, edges_pointer: Pointer, results: list[compare.Result]
) -> Pointer:
    """The comparison's report, a table in the terminal, the recommendation."""
    lengths = plans.lengths_of(config, dataset.shards)
    metrics = [
        compare.read_metrics(
            result,
            [load_plan(config, pointer) for pointer in result.plans[: config.training.epochs]],
            lengths,
        )
        for result in results
    ]
    found = compare.write_comparison(to_dict(config), results, metrics, edges_pointer["edges"])
    for title, columns in (("throughput and batches", compare.SHOWN), ("training", compare.TRAINED)):
        tables.print_wide_table(f"{config.deployment}: {title}", *compare.table(found, columns))
    tables.print_table(
        "recommendation", [("", found["recommendation"]), ("report", f"{found['directory']}/report.md")]
    )
    return found
