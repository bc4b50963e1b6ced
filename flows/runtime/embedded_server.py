"""A Prefect server as a child process of one command, for users who have set no PREFECT_API_URL.

Prefect can start such a server itself; this one differs in six ways. It answers this project alone (see
`flows.runtime.access`). It starts while the flow's modules are being imported, which saves seconds. Ctrl-C
does not reach it, so the end of the run can still be recorded. Its output goes to a file. It ends with its
parent, however the parent ends. One that ends earlier is started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from dflash_core.databases import check_database
from dflash_core.errors import UserError
from dflash_core.launch.stop_signal import end_with_parent, known_parent
from flows.runtime import access
from tasks.storage import locks

# An idle machine needs 10 to 15.
STARTUP_SECONDS = 300.0
STOP_SECONDS = 5.0
# Next step where the database is damaged.
REMEDY = (
    "restore it from a copy, or move it away with its -wal and -shm files: Prefect starts anew without "
    "earlier runs, while stages and trainings that are up to date are still skipped"
)

log = logging.getLogger(__name__)


class EmbeddedServer:
    """A Prefect server on loopback, a child in its own session; its database is that of PREFECT_HOME.

    Args:
        log_path: receives the output of the server.
        port: None: any free port, without the UI and without background services, for a single command. A
            given port: the whole server with its UI.
    """

    def __init__(self, log_path: Path, port: int | None = None) -> None:
        self.log_path, self.port = log_path, port
        # how to sign in to the UI
        self.hint = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._environment: dict[str, str] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process and set PREFECT_API_URL; `wait` returns once it answers.

        Raises:
            UserError: the port is taken, or the database is damaged, locked or cannot be written.
        """
        _check_database()
        port = free_port("127.0.0.1", self.port or 0)
        self._url = f"http://127.0.0.1:{port}/api"
        self.hint = access.protect_server(has_ui=self.port is not None)
        environment = {**os.environ, **known_parent()}
        environment |= {"PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_API_PORT": str(port)}
        if self.port is None:
            environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
        self._environment = environment
        self._process = self._start()
        os.environ["PREFECT_API_URL"] = self._url

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flows.runtime.embedded_server"]
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                [*command, self._environment["PREFECT_SERVER_API_PORT"]],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _keep(self) -> None:
        """Start the server again whenever it ends by itself; Prefect's clients repeat their requests."""
        while (process := self._process) is not None:
            code = process.wait()
            # One that ends at once is not started all the time.
            time.sleep(1.0)
            with self._lock:
                # `stop` has ended it.
                if self._process is not process:
                    return
                self._process = self._start()
            log.warning("Prefect's embedded server has ended with code %d; it is started again", code)

    def wait(self) -> None:
        """Return once the server answers; from then on it is started again where it ends.

        Raises:
            RuntimeError: it ended or did not answer in time; the message names its log.
        """
        assert self._process is not None
        deadline = time.monotonic() + STARTUP_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        # A server is signalled when the thread ends that started it: this one lasts.
                        threading.Thread(target=self._keep, daemon=True, name="embedded-server").start()
                        return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.1)
        code = self._process.poll()
        outcome = "did not answer" if code is None else f"ended with code {code}"
        self.stop()
        raise RuntimeError(
            f"Prefect's embedded server {outcome}; its log is {self.log_path}. Run the same command again; "
            f"where the log names {_database()} again, {REMEDY}"
        )

    def stop(self) -> None:
        """End the server after sending it the events and logs of this process; may be called twice."""
        if (process := self._process) is not None and process.poll() is None:
            _send_pending()
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        os.environ.pop("PREFECT_API_URL", None)
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_database() -> None:
    """Check Prefect's database, unless the user names another one."""
    named = ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
    if "PREFECT_HOME" in os.environ and not any(name in os.environ for name in named):
        check_database(_database(), REMEDY)


def _database() -> Path:
    return Path(os.environ["PREFECT_HOME"]) / "prefect.db"


def _send_pending() -> None:
    """Send the events and logs that Prefect's threads buffer: without a server they would wait for long."""
    if "prefect.flows" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        with contextlib.suppress(Exception):
            worker.drain_all(timeout=STOP_SECONDS)


def free_port(host: str, port: int) -> int:
    """Return the port, or any free one for 0.

    Raises:
        UserError: the port is taken, or this machine has no such address.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"port {port} of {host}: {reason}; allowed: a free port") from error
        return int(probe.getsockname()[1])


def serve(port: int, host: str = "127.0.0.1", names: Sequence[str] = ()) -> None:
    """Run the server in this process until SIGTERM.

    Args:
        names: names and addresses, besides those of loopback, under which it is reached.
    """
    import uvicorn
    from uvicorn.main import STARTUP_FAILURE

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # Prefect creates and changes the tables of its database here; two that do so at once fail.
            with (Path(os.environ["PREFECT_HOME"]).expanduser() / ".start.lock").open("w") as lock:
                locks.lock(lock, wait=True)
                await super().startup(sockets)

    server = Server(
        uvicorn.Config(
            lambda: access.protected_app(names),
            factory=True,
            host=host,
            port=port,
            log_level="error",
            lifespan="on",
            # Connections of clients that listen for events never end by themselves.
            timeout_graceful_shutdown=1,
        )
    )
    server.run()
    if not server.started:
        sys.exit(STARTUP_FAILURE)


if __name__ == "__main__":
    end_with_parent(STOP_SECONDS)
    serve(int(sys.argv[1]))
