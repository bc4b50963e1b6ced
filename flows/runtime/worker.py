"""Every deployment of prefect.yaml from one terminal, without pools and workers: a server with its UI on loopback,
and this process, which starts each requested run as a child.

    python -m flows.runtime.worker                                      (make serve)
    PREFECT_API_URL=http://127.0.0.1:4200/api prefect deployment run train-dflash/quickstart
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from typing import Any

from dflash_core.errors import UserError
from flows.runtime import cli, deployments
from flows.runtime.embedded_server import EmbeddedServer

RUNS_AT_ONCE = 4


def make_deployments() -> list[Any]:
    """What `prefect.yaml` names, as deployments of this process; one run of each at a time."""
    made = []
    for flow_name in deployments.FLOWS:
        module = importlib.import_module(deployments.module_of(flow_name))
        flow = getattr(module, flow_name.replace("-", "_"))
        for name, entry in deployments.deployments(flow_name).items():
            made.append(
                flow.to_deployment(
                    name=name,
                    description=entry.get("description"),
                    parameters=entry.get("parameters"),
                    tags=entry.get("tags"),
                    concurrency_limit=1,
                )
            )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.runtime.worker", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--port", type=int, default=4200, help="of the server, on 127.0.0.1 (default 4200)")
    parser.add_argument("--storage-root", default="runs", help="holds the server's database (default runs)")
    arguments = parser.parse_args()
    server = None
    try:
        root = cli.set_environment(arguments.storage_root)
        if "PREFECT_API_URL" not in os.environ:
            log = root / "logs" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.server.log"
            server = EmbeddedServer(log, arguments.port)
            server.start()
            server.wait()
        from prefect import serve

        from flows.runtime.crashed_runs import close_abandoned

        for name in close_abandoned():
            print(f"flow run {name}: its process is gone, marked as crashed", flush=True)
        print(f"Prefect UI: {os.environ['PREFECT_API_URL'].removesuffix('/api')}", flush=True)
        serve(*make_deployments(), limit=RUNS_AT_ONCE)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.EXIT_USER_ERROR
    finally:
        if server is not None:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
