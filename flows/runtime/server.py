"""Run a Prefect server with its UI, for work pools and workers: `make server`.

    python -m flows.runtime.server                                      # on loopback, port 4200
    python -m flows.runtime.server --host 10.0.0.5 --name gpu-head      # for other machines, see docs

It answers this project alone, see `flows.runtime.access`, and prints how to sign in.
"""

from __future__ import annotations

import argparse
import os
import sys

from dflash_core.errors import UserError
from flows.runtime import access, cli
from flows.runtime.embedded_server import free_port, serve


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.runtime.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=4200, help="default 4200")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    names = "another name by which browsers and workers reach it, may be repeated"
    parser.add_argument("--name", action="append", default=[], help=names)
    root = "directory that holds the server's database and authentication string (default runs)"
    parser.add_argument("--storage-root", default="runs", help=root)
    return parser


def main() -> int:
    """Serve until interrupted, and return the exit code."""
    arguments = _parser().parse_args()
    host, port = arguments.host, arguments.port
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "WARNING")
    os.environ["PREFECT__SERVER_FINAL"] = "1"
    try:
        cli.set_environment(arguments.storage_root)
        free_port(host, port)
        hint = access.protect_server(has_ui=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.EXIT_USER_ERROR
    print(f"Prefect UI: http://{host}:{port}; {hint}", flush=True)
    serve(port, host, [host, *arguments.name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
