"""Train a DFlash drafter: data, length profile, bucket edges, batch plans, training, acceptance, report."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("train-dflash"))

from pathlib import Path

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import FlowOptions
from flows.runtime.entry import run_flow
from tasks import report, train


@run_flow("train-dflash")
def train_dflash(config: RunConfig, options: FlowOptions) -> dict[str, object]:
    """Return the report of the run."""
    steps.check_options(options)
    target = steps.check_target(config, options, steps.prepare_target(config, options))
    dataset = steps.ingest_all(config, options, target)
    profile = steps.profile(config, options, dataset)
    edges = steps.edges(config, options, profile)
    plans = steps.make_plans(config, options, dataset, edges)
    steps.check_ranks(config, target, plans[config.batching.strategy])
    trained = train.train_run(
        config, target, dataset, profile, plans[config.batching.strategy], refresh="train" in options.refresh
    )
    evaluated = steps.evaluate(config, options, target, dataset, Path(trained["run_dir"]) / "drafter")
    return report.report_run(config, dataset, profile, edges, plans, trained, evaluated)
