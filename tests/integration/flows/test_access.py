"""Attacks on the servers of this project: foreign pages, foreign Host names, no password. Loopback only."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.flow_runs import flow_environment
from benchmarks.support.prefect_services import free_port, kill_group, start_module, wait_until_healthy

EVIL = "https://evil.example"
JSON = {"Content-Type": "application/json"}
# A page may send this without asking first.
PLAIN = {"Content-Type": "text/plain"}


@dataclass
class Server:
    """A running server, and its authentication string."""

    url: str
    auth: str = ""

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return status and text of an answer; a body makes the request a POST."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def basic(auth: str) -> str:
    return f"Basic {base64.b64encode(auth.encode()).decode()}"


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[dict[str, Server]]:
    """Both servers over one storage root, started as `make server` and `make ui` start them."""
    made, processes = {}, []
    try:
        for name, options in (("server", ()), ("mlflow_server", ("--workers", "1"))):
            port = free_port()
            command = [
                f"flows.runtime.{name}",
                "--port",
                port,
                "--storage-root",
                str(root / "runs"),
                *options,
            ]
            processes.append(start_module(command, root / f"{name}.log", flow_environment(), cwd=root))
            made[name] = Server(url=f"http://127.0.0.1:{port}")
        wait_until_healthy(f"{made['server'].url}/api")
        wait_until_healthy(made["mlflow_server"].url)
        made["server"].auth = (root / "runs" / "prefect" / "auth-string").read_text().strip()
        yield made
    finally:
        for process in processes:
            kill_group(process)


@pytest.fixture
def prefect(servers: dict[str, Server]) -> Server:
    return servers["server"]


@pytest.fixture
def mlflow(servers: dict[str, Server]) -> Server:
    return servers["mlflow_server"]


def csrf_headers(server: Server) -> dict[str, str]:
    """Return the headers of a client that knows the authentication string and has a CSRF token."""
    own = {"Authorization": basic(server.auth)}
    _, answer = server.request("/api/csrf-token?client=test", **own)
    return {**own, "Prefect-Csrf-Client": "test", "Prefect-Csrf-Token": json.loads(answer)["token"], **JSON}


def test_a_foreign_page_lists_no_deployments_and_creates_no_run(prefect: Server) -> None:
    own = csrf_headers(prefect)
    assert prefect.request("/api/deployments/filter", {}, **own) == (200, "[]")
    flow = {"name": "preview-data"}
    parameters = {"target": {"name": "/tmp/evil", "trust_remote_code": True}}
    for headers in (JSON, PLAIN, own):
        foreign = {**headers, "Origin": EVIL}
        assert prefect.request("/api/deployments/filter", {}, **foreign)[0] == 403
        assert prefect.request("/api/flows/", flow, **foreign)[0] == 403
        run = {"flow_id": "0" * 32, "parameters": parameters}
        assert prefect.request("/api/flow_runs/", run, **foreign)[0] == 403
    assert prefect.request("/api/flows/filter", {}, **own) == (200, "[]")
    # Pages of other servers on this machine, and of files.
    for origin in ("http://127.0.0.1:5000", "null"):
        assert prefect.request("/api/deployments/filter", {}, **own, Origin=origin)[0] == 403


def test_prefect_answers_under_its_own_names_only(prefect: Server) -> None:
    own = {"Authorization": basic(prefect.auth)}
    port = prefect.url.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert prefect.request("/api/admin/version", **own, Host=host)[0] == 400
        assert prefect.request("/", Host=host)[0] == 400
    assert prefect.request("/api/admin/version", **own, Host=f"localhost:{port}")[0] == 200


def test_prefect_wants_the_authentication_string_and_a_csrf_token(prefect: Server) -> None:
    for headers in ({}, {"Authorization": basic("dflash:wrong")}, {"Authorization": "Bearer x"}):
        assert prefect.request("/api/admin/settings", **headers)[0] == 401
        assert prefect.request("/api/csrf-token?client=x", **headers)[0] == 401
    for headers in (JSON, PLAIN, {"Authorization": basic(prefect.auth), **JSON}):
        status, answer = prefect.request("/api/deployments/filter", {}, **headers)
        assert (status, json.loads(answer)) == (403, {"detail": "Missing CSRF token."})
    without_auth = csrf_headers(prefect)
    del without_auth["Authorization"]
    assert prefect.request("/api/deployments/filter", {}, **without_auth)[0] == 401


def test_websockets_want_the_authentication_string_too(prefect: Server) -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus

    async def first_answer(path: str, token: str | None, **options: Any) -> str:
        url = f"ws{prefect.url.removeprefix('http')}/api{path}"
        try:
            async with connect(url, subprotocols=["prefect"], **options) as socket:
                await socket.send(json.dumps({"type": "auth", "token": token}))
                return json.loads(await asyncio.wait_for(socket.recv(), 60))["type"]
        except (ConnectionClosed, InvalidStatus) as error:
            return type(error).__name__

    async def answers(token: str | None, **options: Any) -> set[str]:
        return {
            await first_answer(path, token, **options) for path in ("/events/in", "/events/out", "/logs/out")
        }

    assert asyncio.run(answers(prefect.auth)) == {"auth_success"}
    assert asyncio.run(answers(None)) <= {"ConnectionClosedError", "InvalidStatus"}
    assert asyncio.run(answers("dflash:wrong")) <= {"ConnectionClosedError", "InvalidStatus"}
    assert asyncio.run(answers(prefect.auth, origin=EVIL)) == {"InvalidStatus"}
    own_page = asyncio.run(answers(prefect.auth, origin=prefect.url))
    assert own_page == {"auth_success"}


def test_the_browser_can_sign_in_and_calls_the_server_that_it_came_from(prefect: Server, root: Path) -> None:
    settings = json.loads(prefect.request("/ui-settings")[1])
    assert settings["api_url"] == "/api"
    assert settings["auth"] == "BASIC"
    assert settings["csrf_enabled"] is True
    assert prefect.request("/")[0] == 200
    # What the login page sends.
    own = {"Authorization": basic(prefect.auth), "Origin": prefect.url}
    assert prefect.request("/api/admin/version", **own)[0] == 200
    # Shown on the terminal of the first start, and in no other log.
    log = (root / "server.log").read_text()
    assert log.count(prefect.auth) == 1
    assert f"sign in with {prefect.auth} (kept in " in log


def test_a_foreign_page_changes_nothing_in_mlflow(mlflow: Server) -> None:
    writes = {
        "/api/2.0/mlflow/experiments/create": {"name": "evil"},
        "/ajax-api/2.0/mlflow/experiments/create": {"name": "evil"},
        "/api/2.0/mlflow/experiments/delete": {"experiment_id": "0"},
        "/api/2.0/mlflow/runs/create": {"experiment_id": "0"},
        "/api/2.0/mlflow/registered-models/create": {"name": "evil"},
        "/api/3.0/mlflow/traces": {},
    }
    for path, body in writes.items():
        for origin in (EVIL, "null", "http://127.0.0.1.evil.example"):
            for headers in (JSON, PLAIN):
                assert mlflow.request(path, body, **headers, Origin=origin)[0] == 403, (path, origin)
    search = "/api/2.0/mlflow/experiments/search?max_results=9"
    names = [row["name"] for row in json.loads(mlflow.request(search)[1])["experiments"]]
    # As the server makes them on its start.
    assert sorted(names) == ["Default", "train-dflash"]
    # A page may read no answer.
    request = urllib.request.Request(f"{mlflow.url}{search}", headers={"Origin": EVIL})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] is None


def test_mlflow_answers_under_its_own_names_only(mlflow: Server) -> None:
    body = {"name": "own"}
    # MLflow itself would take the second for an address of a private network.
    for host in ("evil.example", "10.evil.example", "localhost.evil.example"):
        assert mlflow.request("/api/2.0/mlflow/experiments/create", body, **JSON, Host=host)[0] == 403
    host = f"localhost:{mlflow.url.rpartition(':')[2]}"
    assert mlflow.request("/api/2.0/mlflow/experiments/create", body, **JSON, Host=host)[0] == 200
