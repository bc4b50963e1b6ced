"""The authentication string: made once, for its owner only, and sent to servers of this machine alone."""

from __future__ import annotations

import asyncio
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import UserError
from flows.runtime import access

ROOT = Path(__file__).resolve().parents[3]
NAMES = (access.SERVER_AUTH, access.CLIENT_AUTH, "PREFECT_API_KEY", "PREFECT_API_URL", *access.PROTECTION)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a new PREFECT_HOME; the variables of servers are not set and restored afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    return access.auth_file()


def test_the_file_is_new_once_and_belongs_to_its_owner(path: Path) -> None:
    umask = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(access.make_auth, [path] * 8))
    finally:
        os.umask(umask)
    assert sorted(made) == [False] * 7 + [True]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    user, _, password = access.read_auth(path).partition(":")
    assert user == "dflash"
    assert len(password) >= 32


def test_a_file_system_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert access.make_auth(path)
    assert access.read_auth(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode, text, message", [(0o640, "a:b", "mode 640"), (0o600, " \n", "holds no auth")])
def test_a_file_that_protects_nothing_is_refused(path: Path, mode: int, text: str, message: str) -> None:
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UserError, match=f"auth-string: .*{message}.*remove the file"):
        access.protect_server(has_ui=True)
    assert access.SERVER_AUTH not in os.environ


def test_the_string_is_shown_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = access.protect_server(has_ui=True)
    auth = access.read_auth(path)
    assert first == f"sign in with {auth} (kept in {path})"
    assert os.environ[access.SERVER_AUTH] == auth
    assert os.environ[access.CLIENT_AUTH] == auth
    for name in (access.SERVER_AUTH, access.CLIENT_AUTH):
        monkeypatch.delenv(name)
    assert access.protect_server(has_ui=True) == f"sign in with the line in {path}"
    assert os.environ[access.SERVER_AUTH] == auth


def test_the_server_of_one_command_has_a_string_that_is_kept_nowhere(path: Path) -> None:
    assert access.protect_server(has_ui=False) == ""
    assert os.environ[access.SERVER_AUTH].startswith("dflash:")
    assert os.environ[access.CLIENT_AUTH] == os.environ[access.SERVER_AUTH]
    assert not path.exists()


def test_variables_of_the_user_win(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.SERVER_AUTH, "me:secret")
    monkeypatch.setenv("PREFECT_SERVER_CORS_ALLOWED_ORIGINS", "https://mine.example")
    hint = access.protect_server(has_ui=True)
    assert hint == f"sign in with the value of {access.SERVER_AUTH}"
    assert os.environ[access.CLIENT_AUTH] == "me:secret"
    assert os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "https://mine.example"
    assert not path.exists()


@pytest.mark.parametrize(
    "url, own, expected",
    [
        ("http://127.0.0.1:4200/api", {}, "a:b"),
        ("http://localhost:4200/api", {}, "a:b"),
        ("http://127.0.0.1:4200/api", {access.CLIENT_AUTH: "c:d"}, "c:d"),
        ("http://127.0.0.1:4200/api", {"PREFECT_API_KEY": "key"}, None),
        ("https://prefect.example/api", {}, None),
        ("https://localhost.example/api", {}, None),
        ("https://localhost@prefect.example/api", {}, None),
    ],
)
def test_only_servers_of_this_machine_get_the_string(
    path: Path, monkeypatch: pytest.MonkeyPatch, url: str, own: dict[str, str], expected: str | None
) -> None:
    path.write_text("a:b\n")
    path.chmod(0o600)
    for name, value in ({"PREFECT_API_URL": url} | own).items():
        monkeypatch.setenv(name, value)
    access.use_auth_file()
    assert os.environ.get(access.CLIENT_AUTH) == expected


@pytest.mark.parametrize(
    "origin, host, origins, is_allowed",
    [
        (None, "127.0.0.1:4200", [""], True),
        ("http://127.0.0.1:4200", "127.0.0.1:4200", [""], True),
        ("http://127.0.0.1:5000", "127.0.0.1:4200", [""], False),
        ("http://localhost:4200", "127.0.0.1:4200", [""], False),
        ("null", "127.0.0.1:4200", [""], False),
        ("", "127.0.0.1:4200", ["https://mine.example"], False),
        ("https://evil.example", "127.0.0.1:4200", ["https://mine.example"], False),
        ("https://mine.example", "127.0.0.1:4200", ["https://mine.example"], True),
        ("https://evil.example", "127.0.0.1:4200", ["*"], True),
    ],
)
def test_origins(origin: str | None, host: str, origins: list[str], is_allowed: bool) -> None:
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        pass

    headers = [(b"host", host.encode())]
    if origin is not None:
        headers.append((b"origin", origin.encode()))
    scope = {"type": "http", "headers": headers}
    asyncio.run(access.OwnPagesOnly(app, origins)(scope, None, send))
    assert bool(reached) == is_allowed


def test_nothing_starts_an_unprotected_server() -> None:
    sources = [ROOT / "Makefile", *ROOT.glob("flows/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    commands = ("server start", '"server", "start"', "mlflow ui", "mlflow server --", '"mlflow", "server"')
    found = {path.name for path in sources for text in commands if text in path.read_text()}
    # adds the Host names
    assert found == {"mlflow_server.py"}
