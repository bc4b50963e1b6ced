"""List stored outputs that nothing refers to, and remove them with `--param remove=true`."""

import sys

from flows.runtime import cli

if __name__ == "__main__":
    sys.exit(cli.main("prune"))

from prefect import get_run_logger, runtime

from dflash_core.config import RunConfig
from flows.runtime.deployments import PruneOptions
from flows.runtime.entry import run_flow
from tasks import prune as pruning
from tasks.reporting import mlflow_client, tables
from tasks.storage.live_runs import live_runs
from tasks.storage.pointers import root_of


@run_flow("prune")
def prune(config: RunConfig, options: PruneOptions) -> dict[str, object]:
    """Return the removable or removed directories and their size in bytes."""
    root = root_of(config)
    protected = mlflow_client.registered_run_directories(config) if options.keep_runs is not None else set()
    own = str(runtime.flow_run.id)
    removable = pruning.find_removable(
        root, keep_runs=options.keep_runs, protected_runs=protected, flow_run_id=own
    )
    if options.remove:
        removable = pruning.remove(root, removable, flow_run_id=own)
    names = [str(item.path.relative_to(root)) for item in removable]
    num_bytes = sum(item.num_bytes for item in removable)
    sizes = (f"{item.num_bytes / 1e6:,.1f} MB, {item.reason}" for item in removable)
    rows = list(zip(names, sizes))
    tables.print_table("removed" if options.remove else "can be removed", rows)
    for live in live_runs(root, besides=own):
        get_run_logger().info(
            "prune: what %s may use is kept; its note is %s", live.description, live.note.relative_to(root)
        )
    verb = "removed" if options.remove else "to remove (--param remove=true)"
    get_run_logger().info("prune: %d directories, %.1f MB %s", len(names), num_bytes / 1e6, verb)
    return {"directories": names, "bytes": num_bytes}
