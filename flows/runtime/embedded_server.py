"""Prefect's API for the time of one command, when no server is named.

Prefect can start such a server itself; this one differs in what a person at a terminal notices: it starts
while the flow's modules are being imported, Ctrl-C does not reach it (so that the end of the run can still be
recorded), its output goes to a file, and it ends with its parent however that ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from dflash_core.errors import UserError

STARTUP_SECONDS = 300.0  # idle machines need 10 to 15
STOP_SECONDS = 5.0


class EmbeddedServer:
    """A Prefect server on loopback, as a child in a session of its own; its database is PREFECT_HOME's.

    Args:
        port: None takes any free port, for one command alone; a port of the caller's choice comes with the UI
            and with all services.
    """

    def __init__(self, log_path: Path, port: int | None = None) -> None:
        self.log_path, self.port = log_path, port
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def start(self) -> None:
        """Starts the process and names it in PREFECT_API_URL; `wait` says when it answers."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port or 0))
            except OSError as error:
                raise UserError(f"port {self.port}: {error.strerror}; allowed: a free port") from error
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/api"
        environment = {**os.environ, "PREFECT__SERVER_FINAL": "1", "PREFECT_SERVER_API_PORT": str(port)}
        if self.port is None:
            environment |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.runtime.embedded_server", str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.environ["PREFECT_API_URL"] = self._url

    def wait(self) -> None:
        """Returns when the server answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; names its log.
        """
        assert self._process is not None
        give_up = time.monotonic() + STARTUP_SECONDS
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.1)
        ended = self._process.poll()
        what = "did not answer" if ended is None else f"ended with code {ended}"
        self.stop()
        raise RuntimeError(f"Prefect's embedded server {what}; its log is {self.log_path}")

    def stop(self) -> None:
        """Ends the server, once it has what this process still holds for it; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            _send_the_rest()
        os.environ.pop("PREFECT_API_URL", None)
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _send_the_rest() -> None:
    """Events and logs that Prefect's threads hold back; later they would wait long for a server that is gone."""
    if "prefect.flows" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        with contextlib.suppress(Exception):
            worker.drain_all(timeout=STOP_SECONDS)


def serve(port: int) -> None:
    """The server's process."""
    from dflash_core.launch.stop_signal import end_with_parent

    end_with_parent()
    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(
        create_app,
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="on",
        timeout_graceful_shutdown=1,  # connections of clients that listen for events never end by themselves
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]))
