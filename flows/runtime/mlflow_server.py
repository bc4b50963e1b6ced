"""Run MLflow over the storage root on loopback: `make ui`.

    python -m flows.runtime.mlflow_server              # http://127.0.0.1:5000

MLflow itself refuses requests that would change something and come from a page of another origin, except
pages of other servers on loopback. The Host names that it accepts by default include patterns such as `10.*`,
which match names like 10.example.org, so this server is given exactly its own. It asks for no password: other
users of this machine can reach it. Variables of MLflow that the user has set stay as they are. Further
options are passed on to `mlflow server`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from dflash_core.errors import UserError
from flows.runtime import access, cli
from tasks.reporting.mlflow_client import prepare_database


def set_environment(port: int) -> None:
    """Set the variables of the server: its own Host names, no telemetry."""
    names = (f"{name}{suffix}" for name in access.LOOPBACK for suffix in (f":{port}", ""))
    defaults = {
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # It would start seven processes that nothing here needs.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def command(root: Path, port: int) -> list[str]:
    """Return the command of the server over an absolute storage root."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}"]
    return [*command, "--artifacts-destination", str(root / "mlartifacts")]


def main() -> int:
    """Run the server until interrupted, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.runtime.mlflow_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 (default 5000)")
    root_help = "directory that holds mlflow.db (default runs)"
    parser.add_argument("--storage-root", default="runs", help=root_help)
    arguments, others = parser.parse_known_args()
    try:
        root = cli.set_environment(arguments.storage_root)
        prepare_database(root)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.EXIT_USER_ERROR
    set_environment(arguments.port)
    return os.execv(sys.executable, [*command(root, arguments.port), *others])


if __name__ == "__main__":
    sys.exit(main())
