"""The command line of every flow: `python -m flows.<flow> NAME [--param key=JSON ...]`.

`train-dflash FLOW NAME ...` is the same (`flows/runtime/command.py`); help names the command that was typed.

Settings are resolved and checked here, before anything slow is imported: a mistake is reported within a
second and leaves no file. Only then is the environment set that Prefect and MLflow read when they are
imported, and the flow is imported and run. Exit codes: 0 done, 2 a user's mistake, 130 or 143 stopped by
SIGINT or SIGTERM, 1 anything else. A mistake or a failure is one message on stderr; tracebacks are in the log
file that it names.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from dflash_core.redaction import redact, redact_log_records
from dflash_core.telemetry import NO_TELEMETRY
from flows.runtime import access, deployments
from flows.runtime.embedded_server import EmbeddedServer
from flows.runtime.system_errors import mistake_of
from tasks.storage.input_files import check_files

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
# Of Prefect, with handlers of their own.
LOGGERS = ("", ".flow_runs", ".task_runs", "._internal")
# From the end of the flow to the end of the process.
EXIT_SECONDS = 10.0

# The exit code of this process, once it is known.
_exit_code = EXIT_FAILED


def parse_param(text: str) -> dict[str, Any]:
    """Parse one `--param KEY=JSON`; a bare word is a string, a dotted key names one field of a section.

    parse_param("training.epochs=2") == {"training": {"epochs": 2}}

    Raises:
        UserError: no `=`, an empty key, or a value that starts like JSON and is not valid JSON.
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
    """Merge all `--param` of a command line, later ones over earlier ones."""
    given: dict[str, Any] = {}
    for text in texts:
        parameter = parse_param(text)
        if isinstance(parameter.get("data"), list):
            parameter = {"data": {"files": parameter["data"]}}
        given = deployments.merge(given, parameter)
    return given


def set_environment(storage_root: str) -> Path:
    """Set the variables that Prefect and MLflow read at import; must run before either is imported.

    Variables that the user has set stay as they are.

    Returns:
        The absolute storage root, created.

    Raises:
        UserError: the storage root cannot be created or written, or the authentication string not be read.
    """
    root = Path(storage_root).expanduser().resolve()
    try:
        if not root.exists():
            # Data, logs and databases are for the owner; an existing directory keeps its mode.
            root.mkdir(mode=0o700, parents=True)
        (root / "prefect").mkdir(exist_ok=True)
        (root / "logs").mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"storage_root: {storage_root!r} cannot be written: {reason}") from error
    redact_log_records()
    defaults = {
        "PREFECT_HOME": str(root / "prefect"),
        # Prefect's own default of 20 s is too short on a busy machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        # The server logs its own shutdown as an error.
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        **NO_TELEMETRY,
        "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}",
        "MPLBACKEND": "Agg",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    access.use_auth_file()
    return root


class _OneMessage(logging.Filter):
    """A filter for the console: no tracebacks, no repetitions of a failure; `main` prints one message."""

    # Their messages about a server that does not answer repeat, and hold whole events.
    HIDDEN_LOGGERS = ("prefect.task_run_recorder", "prefect._internal", "prefect.events")
    HIDDEN_STARTS = ("Finished in state Failed", "Finished in state Crashed", "Finished in state Cancel")

    def __init__(self, *, embedded: bool) -> None:
        super().__init__()
        # The embedded server serves no pages, so links to them are hidden as well.
        self._hidden_starts = (*self.HIDDEN_STARTS, "View at ") if embedded else self.HIDDEN_STARTS

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or record.name.startswith(self.HIDDEN_LOGGERS):
            return False
        text = record.getMessage()
        repeats_failure = "Crash detected" in text or "exception" in text.lower()
        return not repeats_failure and not text.startswith(self._hidden_starts)


def _set_up_logging(log_path: Path, *, embedded: bool) -> None:
    """Log everything into the file of this command; the console keeps the readable part."""
    to_file = logging.FileHandler(log_path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s | %(levelname)-7s | %(name)s | %(message)s"))
    console_filter = _OneMessage(embedded=embedded)
    # Prefect's handler would print each log that the server did not take.
    logging.raiseExceptions = False
    root = logging.getLogger()
    for logger in [root, *(logging.getLogger(f"prefect{n}") for n in LOGGERS)]:
        for handler in logger.handlers:
            handler.addFilter(console_filter)
        if logger is root or logger.handlers and not logger.propagate:
            logger.addHandler(to_file)
    for name in ("alembic", "httpx", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It prints the traceback of each error that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def _epilog(flow_name: str, command: str) -> str:
    """Return the end of the help text: the deployments, the parameters and examples."""
    named = deployments.deployments(flow_name)
    width = max(map(len, named), default=0) + 2
    descriptions = (f"  {name:<{width}}{entry.get('description', '')}" for name, entry in named.items())
    settings = ", ".join(f.name for f in dataclasses.fields(RunConfig))
    options = ", ".join(deployments.FLOWS[flow_name].option_names())
    return "\n".join(
        [
            f"deployments (parameter sets of {deployments.prefect_yaml()}):",
            *descriptions,
            "",
            textwrap.fill(f"parameters: {settings}; options: {options}", width=100),
            "",
            "examples:",
            f"  {command} quickstart",
            f"  {command} quickstart --param training.epochs=2 --param 'data=[\"chats.jsonl\"]'",
            f"  {command} quickstart --show",
        ]
    )


def _parser(flow_name: str, command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command,
        description=f"{flow_name}: {deployments.FLOWS[flow_name].summary}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_epilog(flow_name, command),
        add_help=False,
    )
    changes = "change one parameter; a mapping changes the keys it names; KEY may be dotted"
    parser.add_argument("name", nargs="?", help="a deployment, see below")
    parser.add_argument("--param", "-p", action="append", default=[], metavar="KEY=JSON", help=changes)
    parser.add_argument("--show", action="store_true", help="print the settings that would be used, and exit")
    parser.add_argument("--help", "-h", action="store_true", help="show this message and exit")
    return parser


def print_text(text: str) -> int:
    """Print to stdout and return 0; a reader that has closed the pipe, such as `head`, is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Terminated(KeyboardInterrupt):
    """Raised by SIGTERM: ends a run as Ctrl-C does, through every `finally`."""


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated


def _run(flow_name: str, config: RunConfig, options: deployments.FlowOptions) -> int:
    """Run the flow and return the exit code; the caller handles mistakes and interruptions."""
    root = set_environment(config.storage_root)
    log_path = root / "logs" / f"{flow_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    signal.signal(signal.SIGTERM, _terminate)
    server = None
    if "PREFECT_API_URL" not in os.environ:
        server = EmbeddedServer(log_path.with_suffix(".server.log"))
        server.start()
    try:
        module = importlib.import_module(deployments.module_of(flow_name))
        flow = getattr(module, deployments.function_of(flow_name))
        _set_up_logging(log_path, embedded=server is not None)
        from flows.runtime.crashed_runs import report_crashed_runs
        from flows.runtime.entry import run_resolved

        if server is not None:
            server.wait()
            # A worker does this with another server.
            report_crashed_runs()

        run_resolved(flow, config, options)
    except (UserError, KeyboardInterrupt):
        raise
    # Prefect ends flows by exceptions that are not subclasses of Exception.
    except BaseException as error:  # noqa: B036
        cause = _cause(error)
        if cause is not None:
            raise cause from error
        if "401 Unauthorized" in str(error):
            raise access.wrong_auth() from error
        logging.getLogger().error("the flow failed", exc_info=error)
        if (mistake := mistake_of(error)) is not None:
            raise mistake from error
        message = redact(f"error: {flow_name}: {type(error).__name__}: {error}")
        print(f"{message}\nlog: {log_path}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        if server is not None:
            _end_in_any_case()
            server.stop()
    return 0


def _end_in_any_case() -> None:
    """End the process after `EXIT_SECONDS`: Prefect's threads may wait long for a server that has ended."""
    timer = threading.Timer(EXIT_SECONDS, lambda: os._exit(_exit_code))
    timer.daemon = True
    timer.start()


def _cause(error: BaseException | None) -> BaseException | None:
    """Return the user's mistake or the interruption behind an exception, or None."""
    while error is not None and not isinstance(error, UserError | KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def main(flow_name: str, argv: list[str] | None = None, *, command: str | None = None) -> int:
    """Run a flow from the command line and return the exit code.

    Args:
        argv: None: the arguments of this process.
        command: what the user typed before them; None: `python -m flows.<flow>`.
    """
    global _exit_code
    try:
        parser = _parser(flow_name, command or f"python -m {deployments.module_of(flow_name)}")
        arguments = parser.parse_args(argv)
        if arguments.help:
            return print_text(parser.format_help().rstrip())
        if arguments.name is None:
            parser.print_help(sys.stderr)
            return EXIT_USER_ERROR
        config, options = deployments.resolve(flow_name, arguments.name, parse_params(arguments.param))
        if arguments.show:
            return print_text(json.dumps(deployments.to_parameters(config, options), indent=2))
        check_files(config)
        _exit_code = _run(flow_name, config, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _exit_code = EXIT_USER_ERROR
    except KeyboardInterrupt as stopped:
        print("stopped; the next run resumes from the last complete checkpoint", file=sys.stderr)
        _exit_code = EXIT_TERMINATED if isinstance(stopped, _Terminated) else EXIT_INTERRUPTED
    return _exit_code
