"""Decode speculatively with a trained drafter: the deployment's latest, or the one at `drafter_path`."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("evaluate-drafter"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import EvaluateOptions
from flows.runtime.entry import run_flow
from tasks.evaluate import publish_evaluation
from tasks.reporting import evaluation_tables, tables


@run_flow("evaluate-drafter")
def evaluate_drafter(config: RunConfig, options: EvaluateOptions) -> dict[str, object]:
    """Return the evaluation."""
    directory, target, dataset = steps.drafter_and_prompts(config, options)
    evaluated = steps.evaluate(config, options, target, dataset, directory)
    publish_evaluation(config, evaluated, str(directory))
    figures = evaluated["evaluation"]
    tables.print_wide_table(f"{config.deployment}: {directory}", *evaluation_tables.set_table(figures))
    tables.print_table("all prompts", evaluation_tables.evaluation_rows(figures))
    return figures
