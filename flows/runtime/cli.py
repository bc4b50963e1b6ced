"""The command line of every flow: `python -m flows.<flow> NAME [--param key=JSON ...]`.

It reads the named parameter set, checks every setting, sets the environment that Prefect and MLflow read when
they are imported, and only then imports the flow. Exit codes: 0 done, 2 a user's mistake, 130 or 143 stopped,
1 anything else. A mistake or a failure is one message on stderr; the whole story, tracebacks included, is in
the log file it names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dflash_core.config import to_dict
from dflash_core.errors import UserError
from flows.runtime import deployments
from flows.runtime.embedded_server import EmbeddedServer
from tasks.storage.input_files import check_files

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
EXIT_SECONDS = 10.0  # from the end of the flow to the end of the process

_exit_code = EXIT_FAILED  # of this process, once it is known


def parse_param(text: str) -> dict[str, Any]:
    """One `--param`: `key=JSON`, where a bare word is a string and a dotted key names one field of a section.

    parse_param("training.epochs=2") == {"training": {"epochs": 2}}

    Raises:
        UserError: no `=`, an empty key, or text that starts like JSON and is not.
    """
    key, separator, raw = text.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise UserError(f"--param {text!r} is not allowed; allowed: key=JSON, such as training.epochs=2")
    try:
        value = json.loads(raw)
    except json.JSONDecodeError as error:
        if raw[:1] in '{["':
            raise UserError(f"--param {key}: {raw!r} is not valid JSON ({error})") from error
        value = raw
    for part in reversed(parts):
        value = {part: value}
    return value


def parse_params(texts: list[str]) -> dict[str, Any]:
    """All `--param` of a command line, later ones over earlier ones."""
    given: dict[str, Any] = {}
    for text in texts:
        one = parse_param(text)
        if isinstance(one.get("data"), list):
            one = {"data": {"files": one["data"]}}
        given = deployments.merge(given, one)
    return given


def set_environment(storage_root: str) -> Path:
    """Sets what Prefect and MLflow read at import; must run before either is imported.

    `PREFECT_API_URL`, `PREFECT_HOME` and `MLFLOW_TRACKING_URI` of the user win.

    Returns:
        The absolute storage root, created.

    Raises:
        UserError: the storage root cannot be created or written.
    """
    root = Path(storage_root).expanduser().resolve()
    try:
        (root / "prefect").mkdir(parents=True, exist_ok=True)
        (root / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"storage_root: {storage_root!r} cannot be written: {error.strerror or error}"
        ) from error
    defaults = {
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",  # of Prefect's own; 20 s are too short
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # its own shutdown is logged as an error
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}",
        "MPLBACKEND": "Agg",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return root


class _OneMessage(logging.Filter):
    """Keeps tracebacks and the engine's echo of a failure off the console; `main` prints the one message."""

    def __init__(self, *, embedded: bool) -> None:
        super().__init__()
        self._embedded = embedded  # whose pages nobody can open

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or record.name.startswith("prefect.task_run_recorder"):
            return False
        text = record.getMessage()
        return not (
            text.startswith(
                ("Finished in state Failed", "Finished in state Crashed", "Finished in state Cancel")
            )
            or self._embedded
            and text.startswith("View at ")
            or "Crash detected" in text
            or "exception" in text.lower()
        )


def _set_up_logging(log_path: Path, *, embedded: bool) -> None:
    """Everything into a log file of its own; the console keeps the readable part."""
    to_file = logging.FileHandler(log_path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s | %(levelname)-7s | %(name)s | %(message)s"))
    console_filter = _OneMessage(embedded=embedded)
    root = logging.getLogger()
    for logger in [root, *(logging.getLogger(f"prefect{n}") for n in ("", ".flow_runs", ".task_runs"))]:
        for handler in logger.handlers:
            handler.addFilter(console_filter)
        if logger is root or logger.handlers and not logger.propagate:
            logger.addHandler(to_file)
    for name in ("alembic", "mlflow.store.db.utils", "httpx", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _parser(flow_name: str) -> argparse.ArgumentParser:
    info = deployments.FLOWS[flow_name]
    lines = [
        f"  {name:<14}{entry.get('description', '')}"
        for name, entry in deployments.deployments(flow_name).items()
    ]
    parser = argparse.ArgumentParser(
        prog=f"python -m {deployments.module_of(flow_name)}",
        description=f"{flow_name}: {info.summary}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="deployments (parameter sets of prefect.yaml):\n"
        + "\n".join(lines)
        + "\n\nparameters: the sections of a run (target, data, batching, drafter, objective, optimizer, "
        "training,\n"
        "evaluation, tracking), storage_root, deployment"
        + "".join(f", {name}" for name in info.option_names())
        + "\n\nexamples:\n"
        f"  python -m {deployments.module_of(flow_name)} quickstart\n"
        f"  python -m {deployments.module_of(flow_name)} quickstart --param training.epochs=2 "
        "--param 'data=[\"chats.jsonl\"]'\n"
        f"  python -m {deployments.module_of(flow_name)} quickstart --show",
    )
    parser.add_argument("name", nargs="?", help="a deployment, see below")
    parser.add_argument(
        "--param",
        "-p",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="change one parameter; a mapping changes the keys it names; KEY may be dotted",
    )
    parser.add_argument("--show", action="store_true", help="print the settings that would be used, and exit")
    return parser


class _Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run as Ctrl-C does, through every `finally`."""


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated


def _run(flow_name: str, parameters: dict[str, Any]) -> int:
    """Runs the flow with resolved parameters: what Prefect records of the run is complete."""
    root = set_environment(parameters["storage_root"])
    log_path = root / "logs" / f"{flow_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    signal.signal(signal.SIGTERM, _terminate)
    server = None
    if "PREFECT_API_URL" not in os.environ:
        server = EmbeddedServer(log_path.with_suffix(".server.log"))
        server.start()
    try:
        module = importlib.import_module(deployments.module_of(flow_name))
        flow = getattr(module, flow_name.replace("-", "_"))
        _set_up_logging(log_path, embedded=server is not None)
        if server is not None:
            server.wait()
        flow(**parameters)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: B036 - Prefect ends flows by exceptions of its own
        cause = _cause(error)
        if cause is not None:
            raise cause from error
        logging.getLogger().error("the flow failed", exc_info=error)
        print(f"error: {flow_name}: {type(error).__name__}: {error}\nlog: {log_path}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if server is not None:
            _end_in_any_case()
            server.stop()
    return 0


def _end_in_any_case() -> None:
    """Prefect's threads may wait long for a server that is gone; the command's outcome is known by now."""
    timer = threading.Timer(EXIT_SECONDS, lambda: os._exit(_exit_code))
    timer.daemon = True
    timer.start()


def _cause(error: BaseException | None) -> BaseException | None:
    """The user's mistake or the interruption behind an exception, if there is one."""
    while error is not None and not isinstance(error, UserError | KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def main(flow_name: str, argv: list[str] | None = None) -> int:
    """Runs a flow from the command line and returns the exit code."""
    global _exit_code
    try:
        parser = _parser(flow_name)
        arguments = parser.parse_args(argv)
        if arguments.name is None:
            parser.print_help(sys.stderr)
            return EXIT_USER_ERROR
        given = parse_params(arguments.param)
        config, options = deployments.resolve(flow_name, arguments.name, given)
        parameters = {**to_dict(config), **to_dict(options)}
        if arguments.show:
            print(json.dumps(parameters, indent=2))
            return 0
        check_files(config)
        _exit_code = _run(flow_name, parameters)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit_code = EXIT_USER_ERROR
    except KeyboardInterrupt as stopped:
        print("stopped; the next run resumes from the last complete checkpoint", file=sys.stderr)
        _exit_code = EXIT_TERMINATED if isinstance(stopped, _Terminated) else EXIT_INTERRUPTED
    return _exit_code
