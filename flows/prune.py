"""List stored outputs that no run refers to, and remove them when asked: `--param remove=true`."""
# ruff: noqa: E402 (the command line sets the environment before anything imports prefect)

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("prune"))

from prefect import get_run_logger

from dflash_core.config import RunConfig
from flows import steps
from flows.runtime.deployments import PruneOptions
from flows.runtime.entry import run_flow
from tasks import prune as pruning
from tasks.reporting import mlflow_client, tables


@run_flow("prune")
def prune(config: RunConfig, options: PruneOptions) -> dict[str, object]:
    """Returns how many directories and bytes could go, or went."""
    root = steps.root_of(config)
    protected = mlflow_client.registered_run_directories(config) if options.keep_runs is not None else set()
    found = pruning.find_removable(root, keep_runs=options.keep_runs, protected_runs=protected)
    total = sum(item.num_bytes for item in found)
    rows = [
        (str(item.path.relative_to(root)), f"{item.num_bytes / 1e6:,.1f} MB, {item.reason}") for item in found
    ]
    tables.print_table("removed" if options.remove else "can be removed", rows)
    if options.remove:
        pruning.remove(found)
    verb = "removed" if options.remove else "to remove (--param remove=true)"
    get_run_logger().info("prune: %d directories, %.1f MB %s", len(found), total / 1e6, verb)
    return {"directories": [str(item.path.relative_to(root)) for item in found], "bytes": total}
