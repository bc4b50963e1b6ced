"""The start of a Prefect server."""

from __future__ import annotations

import contextlib
import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from flows.runtime import access
from flows.runtime.embedded_server import serve


def test_servers_prepare_their_database_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        prepared.set()
        # Ends the server.
        await send({"type": "lifespan.startup.failed"})

    def run() -> None:
        with contextlib.suppress(SystemExit):
            serve(0)

    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setattr(access, "protected_app", lambda names: app)
    server = threading.Thread(target=run)
    with (tmp_path / ".start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.start()
        assert not prepared.wait(1.0)
    server.join(60)
    assert prepared.is_set()
