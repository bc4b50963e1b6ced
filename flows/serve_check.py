"""Serve a trained drafter with vLLM on this machine and compare its acceptance with that of our evaluator.

The engine runs in a separate environment (`make serve-env`), as a child process that shares only JSON files
with this one. It decodes greedily without the drafter, with it, and, as a control, with a copy whose layer
ids are one off.

The comparison is on fixed continuations: the engine's own speculative output. Our evaluator takes the same
prompts, but every draft is judged by the token that the engine wrote at its position
(`dflash_core/serving/replay.py`). Two free-running decoders would be a weaker test: in bfloat16 they part at
the first near tie, write different texts, and differ in acceptance because of the texts alone. Along one text
the two differ only where drafts differ, so a difference can be traced to one step. Rates come from the
engine's metrics, which count a last step in full; the replay counts the same way.

`dflash_core/serving/check.py` and `agreement.py` define what has to hold. In addition, wherever the engine's
greedy output with the drafter parts from that without, the target's two best logits are within two bfloat16
steps, and the control must fail.
"""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("serve-check"))

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import ServeCheckOptions
from flows.runtime.entry import run_flow
from tasks.reporting import serve_check_tables, tables


@run_flow("serve-check")
def serve_check(config: RunConfig, options: ServeCheckOptions) -> dict[str, object]:
    """Return the comparison."""
    directory, target, dataset = steps.drafter_and_prompts(config, options)
    result = steps.check_serving(config, options, target, dataset, directory)
    tables.print_table(f"{config.deployment}: {directory}", serve_check_tables.summary_rows(result))
    return result
