"""What each batching strategy would cost on this data, before training."""
# ruff: noqa: E402 (the command line sets the environment before anything imports prefect)

import sys

from flows import cli

if __name__ == "__main__":
    sys.exit(cli.main("advise"))

import json
from datetime import timedelta

from dflash_core.config import RunConfig
from flows import steps
from flows.deployments import FlowOptions
from flows.entry import run_flow
from tasks import advice, report, runs


@run_flow("advise")
def advise(config: RunConfig, options: FlowOptions) -> dict[str, object]:
    """Returns the predicted figures of each strategy and the recommendation."""
    steps.check_options(options)
    target = steps.prepare_target(config, options)
    dataset = steps.ingest_all(config, options, target)
    profile = steps.profile(config, options, dataset)
    edges = steps.edges(config, options, profile)
    plans = steps.make_plans(config, options, dataset, edges)
    figures = report.plan_figures(plans)
    loaded = {strategy: steps.load_plan(config, epochs[0]) for strategy, epochs in plans.items()}
    summary = runs.latest_directory(config) / "summary.json"
    measured = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None
    model = advice.cost_model(
        steps.target_directory(config, target), config, measured, loaded[config.batching.strategy]
    )
    table = {name: figures[name] | advice.predict(plan, model) for name, plan in loaded.items()}
    epochs = config.training.epochs
    rows = [
        (
            name,
            f"{row['tokens_per_second']:,.0f} real tokens/s, "
            f"{timedelta(seconds=round(row['seconds'] * epochs))} for {epochs} "
            f"epochs, padding efficiency {row['padding_efficiency']:.4f}, mixing {row['mixing_step']:.2f}, "
            f"{row['padded_shapes']:.0f} shapes",
        )
        for name, row in table.items()
    ]
    own = table[config.batching.strategy]
    ranks = max(2, config.training.num_drafter_ranks)
    split = advice.split_ranks(own["capture_seconds"], own["drafter_seconds"], ranks)
    sentence = advice.recommend(table, edges["knee"], config.batching.num_buckets, edges["edges"])
    basis = (
        "scaled to the latest run"
        if measured
        else "from shapes and an assumed speed, nothing was measured yet"
    )
    report.print_table(
        f"{config.deployment}: predicted, {basis}",
        [
            *rows,
            ("buckets: chosen, knee", f"{len(edges['edges']) - 1}, {edges['knee']}"),
            (f"split of {ranks} devices", f"{split[0]} for the target, {split[1]} for the drafter"),
            ("recommendation", sentence),
        ],
    )
    return {"strategies": table, "knee": edges["knee"], "split": list(split), "recommendation": sentence}
