"""The server of a command that has none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from benchmarks.support.prefect_services import wait_until, wait_until_healthy
from flows.runtime.embedded_server import EmbeddedServer


def test_a_server_that_was_killed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "")
    server = EmbeddedServer(tmp_path / "server.log")
    server.start()
    try:
        server.wait()
        first = server._process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: server._process is not first, 60)
        second = server._process
        assert second is not None
        wait_until_healthy(os.environ["PREFECT_API_URL"])
    finally:
        server.stop()
    assert second.poll() is not None
    assert server._process is None
