"""Train every batching strategy on the same samples and anchors, from the same weights, and compare them."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("compare-strategies"))

from dataclasses import replace
from pathlib import Path

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import CompareOptions
from flows.runtime.entry import run_flow
from tasks import compare, train


@run_flow("compare-strategies")
def compare_strategies(config: RunConfig, options: CompareOptions) -> dict[str, object]:
    """Return the comparison."""
    steps.check_options(options)
    name = f"compare-{config.deployment}"
    group = config.tracking.group or name
    config = replace(
        config,
        deployment=name,
        training=replace(config.training, check_initial_loss=True),
        tracking=replace(config.tracking, group=group),
    )
    target = steps.check_target(config, options, steps.prepare_target(config, options))
    dataset = steps.ingest_all(config, options, target)
    profile = steps.profile(config, options, dataset)
    edges = steps.edges(config, options, profile)
    model, _ = steps.cost_model(config, options, target, dataset)
    results = []
    for seed in options.seeds:
        seeded = replace(config, training=replace(config.training, seed=seed))
        plans = steps.make_plans(
            seeded, options, dataset, edges, strategies=options.strategies, all_epochs=True
        )
        for strategy in options.strategies:
            own = replace(seeded, batching=replace(config.batching, strategy=strategy))
            label = f"{strategy} seed {seed}"
            trained = train.train_run(
                own,
                target,
                dataset,
                profile,
                plans[strategy],
                refresh="train" in options.refresh,
                label=f"train {label}",
            )
            drafter = Path(trained["run_dir"]) / "drafter"
            evaluated = steps.evaluate(own, options, target, dataset, drafter, label=f"evaluate {label}")
            results.append(
                compare.Result(
                    strategy=strategy,
                    seed=seed,
                    plans=plans[strategy],
                    trained=trained,
                    evaluation=evaluated["evaluation"],
                    predicted_seconds=steps.predict_seconds(own, plans[strategy], model),
                    initial=compare.read_initial_loss(Path(trained["run_dir"])),
                )
            )
    return compare.report_comparison(config, dataset, edges, results)
