"""Redo only what depends on new data or on the number of buckets: ingest, length profile, edges, plans."""

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
    """Return the edges and the plan metrics of each strategy."""
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
