"""Access to the servers that this project starts: they answer this project and its browser pages alone.

A server on loopback can be reached by every user of the machine and by every web page that the user has open.
So it asks for an authentication string; it refuses requests whose Host header is not one of its own names (a
page whose name was made to point at 127.0.0.1), and requests that a page of another origin sends; and it
demands CSRF tokens. Variables of Prefect and MLflow that the user has set stay as they are. This module
imports neither.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_core.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost")
SERVER_AUTH, CLIENT_AUTH = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
# Of the names that Prefect reads for a setting, these count least: another one that the user has set wins.
PROTECTION = {
    "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
    # No page of another origin.
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "",
    # Relative, so that the pages call the server under the name by which the browser reached it.
    "PREFECT_UI_API_URL": "/api",
}


def auth_file() -> Path:
    """Return the file with the authentication string of the servers that use this PREFECT_HOME."""
    return Path(os.environ["PREFECT_HOME"]).expanduser() / "auth-string"


def read_auth(path: Path) -> str:
    """Return the authentication string of a file.

    Raises:
        UserError: the file is empty or cannot be read, or other users can read it.
    """
    remedy = "remove the file, and the next server makes a new one"
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            auth = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from error
    if mode & 0o077:
        raise UserError(f"{path}: other users can access it (mode {mode:o}), allowed: 600; {remedy}")
    if not auth:
        raise UserError(f"{path}: holds no authentication string; {remedy}")
    return auth


def make_auth(path: Path) -> bool:
    """Create the file with a new authentication string unless it exists; return True when it is new.

    The file appears complete and with mode 600; of several processes that start at once, one creates it.
    """
    if path.exists():
        return False
    # Mode 600 from the start.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f"dflash:{secrets.token_urlsafe(24)}\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        # A file system without hard links.
        except OSError:
            os.rename(temporary, path)
        return True
    finally:
        Path(temporary).unlink(missing_ok=True)


def protect_server(*, has_ui: bool) -> str:
    """Set the variables of a server that this process starts, and of the clients in this process.

    Must run before prefect is imported.

    Args:
        has_ui: True: people and other commands use the server too, so the authentication string is that of
            `auth_file`. False: the server belongs to one command, which makes a string that no other knows.

    Returns:
        A line that says how to sign in; it shows the authentication string only when that is new.
    """
    for name, value in PROTECTION.items():
        os.environ.setdefault(name, value)
    given = next((name for name in (SERVER_AUTH, CLIENT_AUTH) if os.environ.get(name)), None)
    if given is not None:
        auth, hint = os.environ[given], f"sign in with the value of {given}"
    elif has_ui:
        path = auth_file()
        is_new = make_auth(path)
        auth = read_auth(path)
        hint = f"sign in with {auth} (kept in {path})" if is_new else f"sign in with the line in {path}"
    else:
        auth, hint = f"dflash:{secrets.token_urlsafe(24)}", ""
    os.environ.setdefault(SERVER_AUTH, auth)
    os.environ.setdefault(CLIENT_AUTH, auth)
    return hint


def use_auth_file() -> None:
    """Let clients of a server on this machine use the string of `auth_file`, where the user has set none.

    It is never sent to another machine.
    """
    url = os.environ.get("PREFECT_API_URL", "")
    has_own = any(map(os.environ.get, (CLIENT_AUTH, "PREFECT_API_KEY")))
    if not has_own and urlsplit(url).hostname in LOOPBACK and auth_file().exists():
        os.environ[CLIENT_AUTH] = read_auth(auth_file())


def wrong_auth() -> UserError:
    """Return the error for a Prefect server that refuses this process."""
    return UserError(
        f"{CLIENT_AUTH}: it is not set, or the server of PREFECT_API_URL refuses it; allowed: the server's "
        "own (of make server and make serve: the line in prefect/auth-string of their storage root)"
    )


class OwnPagesOnly:
    """ASGI middleware that refuses requests and websockets which a page of another origin sends.

    Browsers name the origin of a page in every request that may change something and in every websocket.
    Same origin means that Origin and Host name the same host and port. CORS headers alone would only hide the
    answer from the page.

    Args:
        origins: other origins that are allowed; `*` stands for all.
    """

    def __init__(self, app: Any, origins: Sequence[str] = ()) -> None:
        self._app, self._origins = app, set(origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        answer = self._app
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin, headers.get("host", "")):
                answer = PlainTextResponse("Requests of other origins are not allowed", status_code=403)
        await answer(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        is_own = origin in (f"http://{host}", f"https://{host}")
        return is_own or not self._origins.isdisjoint((origin, "*"))


def protected_app(names: Sequence[str] = ()) -> Any:
    """Return Prefect's server behind the checks of Host and Origin.

    Args:
        names: names or addresses, besides those of loopback, under which the server is reached.
    """
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_SERVER_CORS_ALLOWED_ORIGINS
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    origins = PREFECT_SERVER_CORS_ALLOWED_ORIGINS.value().split(",")
    own_pages = OwnPagesOnly(create_app(), origins)
    return TrustedHostMiddleware(own_pages, allowed_hosts=[*LOOPBACK, *names], www_redirect=False)
