"""A trained drafter served by vLLM on this machine, and whether the engine accepts what our evaluator accepts.

The engine runs in an environment of its own (`make serve-env`), as a child process that shares only JSON files with
this one: greedily without the drafter, with it, and, as a control, with a copy whose layer ids are one off.

The comparison is on fixed continuations: the engine's own speculative output. Our evaluator takes the same prompts,
but every draft is judged by the token that the engine wrote at its position (`dflash_core/serving/replay.py`). Two
free-running decoders would be a weaker test: in bfloat16 they part at the first near tie, write different texts, and
differ in acceptance by the texts alone. Along one text the two differ only where drafts do, and step by step it can be
said who is right. Rates come from the engine's metrics, in which a last step counts in full; the replay counts the
same way.

What has to hold is said in `dflash_core/serving/agreement.py`; besides, wherever the engine's greedy output with the
drafter parts from that without, the target's two best logits are within two bfloat16 steps, and the control fails.
"""
# ruff: noqa: E402 (the command line sets the environment before anything imports prefect)

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("serve-check"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import ServeCheckOptions
from flows.runtime.entry import run_flow
from tasks import serve_check as checking
from tasks.reporting import tables


@run_flow("serve-check")
def serve_check(config: RunConfig, options: ServeCheckOptions) -> dict[str, object]:
    """Returns the comparison."""
    directory, target, dataset = steps.drafter_and_prompts(config, options)
    result = steps.serve_check(config, options, target, dataset, directory)
    tables.print_table(f"{config.deployment}: {directory}", checking.summary_rows(result))
    return result
