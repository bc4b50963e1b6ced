"""Serve every deployment of prefect.yaml from one terminal, without work pools and workers.

    train-dflash serve                                   # or: make serve, python -m flows.runtime.worker
    export PREFECT_API_URL=http://127.0.0.1:4200/api PREFECT_API_AUTH_STRING="$(cat runs/prefect/auth-string)"
    prefect deployment run train-dflash/quickstart

Starts a Prefect server with its UI on loopback, unless PREFECT_API_URL names one, registers the deployments,
and starts each requested run as a child process: at most `RUNS_AT_ONCE`, and one of each deployment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from flows.runtime import cli, deployments
from flows.runtime.embedded_server import EmbeddedServer

RUNS_AT_ONCE = 4
PACKAGES = ("flows", "tasks", "sql", "dflash_core")


def check_working_directory() -> None:
    """Refuse a working directory with packages that have the names of ours: Prefect imports runs from there.

    Raises:
        UserError: there is such a package, and it is not this one.
    """
    here = Path.cwd()
    if here == Path(__file__).resolve().parents[2]:
        return
    for name in PACKAGES:
        for other in (here / name / "__init__.py", here / f"{name}.py"):
            if other.exists():
                raise UserError(
                    f"working directory: {str(other)!r} would be imported in place of this project's package "
                    f"{name!r}; allowed: a directory without packages named {', '.join(PACKAGES)}"
                )


def make_deployments() -> list[Any]:
    """Return the deployments of `prefect.yaml` as runnable deployments; one run of each at a time."""
    from prefect.deployments.runner import EntrypointType

    runnable = []
    for flow_name in deployments.FLOWS:
        module = importlib.import_module(deployments.module_of(flow_name))
        flow = getattr(module, deployments.function_of(flow_name))
        for name, entry in deployments.deployments(flow_name).items():
            runnable.append(
                flow.to_deployment(
                    name=name,
                    description=entry.get("description"),
                    parameters=entry.get("parameters"),
                    tags=entry.get("tags"),
                    concurrency_limit=1,
                    # A path would have to be found from the working directory.
                    entrypoint_type=EntrypointType.MODULE_PATH,
                )
            )
    return runnable


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    port = "port of the server on 127.0.0.1 (default 4200); unused where PREFECT_API_URL is set"
    parser.add_argument("--port", type=int, default=4200, help=port)
    root = "directory that holds the server's database and log (default runs)"
    parser.add_argument("--storage-root", default="runs", help=root)
    return parser


def main(argv: list[str] | None = None, *, command: str = "python -m flows.runtime.worker") -> int:
    """Serve until interrupted, and return the exit code.

    Args:
        argv: None: the arguments of this process.
        command: what the user typed before them.
    """
    arguments = _parser(command).parse_args(argv)
    server, hint = None, ""
    try:
        check_working_directory()
        root = cli.set_environment(arguments.storage_root)
        if "PREFECT_API_URL" not in os.environ:
            log = root / "logs" / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.server.log"
            server = EmbeddedServer(log, arguments.port)
            server.start()
            server.wait()
            hint = f"; {server.hint}"
        from prefect import serve

        from flows.runtime.crashed_runs import report_crashed_runs

        report_crashed_runs()
        print(f"Prefect UI: {os.environ['PREFECT_API_URL'].removesuffix('/api')}{hint}", flush=True)
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
