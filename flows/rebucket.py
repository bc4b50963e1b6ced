"""After a change of the data or of the number of buckets: ingest of new files, profile, edges, plans; nothing
else.
"""
# ruff: noqa: E402 (the command line sets the environment before anything imports prefect)

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("rebucket"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import FlowOptions
from flows.runtime.entry import run_flow


@run_flow("rebucket")
def rebucket(config: RunConfig, options: FlowOptions) -> dict[str, object]:
    """Returns the edges and each strategy's plan metrics."""
    steps.check_options(options)
    target = steps.prepare_target(config, options)
    dataset = steps.ingest_all(config, options, target)
    profile = steps.profile(config, options, dataset)
    edges = steps.edges(config, options, profile)
    plans = steps.make_plans(config, options, dataset, edges)
    steps.show_plans(config, dataset, profile, edges, plans)
    return {
        "edges": edges["edges"],
        "plans": {s: [p["metrics"] for p in epochs] for s, epochs in plans.items()},
    }
