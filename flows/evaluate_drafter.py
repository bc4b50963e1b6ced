"""Decode speculatively with a trained drafter: the deployment's latest, or the one at `drafter_path`."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("evaluate-drafter"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import EvaluateOptions
from flows.runtime.entry import run_flow
from tasks.reporting import report_tables, tables


@run_flow("evaluate-drafter")
def evaluate_drafter(config: RunConfig, options: EvaluateOptions) -> dict[str, object]:
    """Return the evaluation."""
    directory, target, dataset = steps.drafter_and_prompts(config, options)
    evaluated = steps.evaluate(config, options, target, dataset, directory)
    figures = evaluated["evaluation"]
    rows = [*report_tables.evaluation_rows(figures), *report_tables.acceptance_rows(figures)]
    tables.print_table(f"{config.deployment}: {directory}", rows)
    return figures
