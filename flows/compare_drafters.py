"""Decode the same prompts of one target with two or more drafters, and report the paired differences."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("compare-drafters"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import CompareDraftersOptions
from flows.runtime.entry import run_flow
from tasks import compare_drafters as comparing
from tasks.reporting import tables
from tasks.storage.pointers import root_of


@run_flow("compare-drafters")
def compare_drafters(config: RunConfig, options: CompareDraftersOptions) -> dict[str, object]:
    """Return the comparison."""
    directories, target, dataset = steps.drafters_and_prompts(config, options)
    config = steps.for_comparison(config)
    names = comparing.names_of(directories, root_of(config))
    evaluated = [
        comparing.Evaluated(
            name=name,
            directory=str(directory),
            pointer=steps.evaluate(config, options, target, dataset, directory, label=f"evaluate {name}"),
        )
        for name, directory in zip(names, directories)
    ]
    comparison = comparing.compare_drafters(config, evaluated)
    tables.print_wide_table(config.deployment, *comparing.drafter_table(comparison))
    rows = [("", comparing.verdict(pair)) for pair in comparison["differences"]]
    tables.print_table("paired", [*rows, ("report", f"{comparison['directory']}/report.md")])
    return comparison
