"""One HTTP request to a server that need not be trusted: no redirects, a size limit and one time limit.

- A redirect is an error: following one would send the headers, and with them a key, to another address.
- The time limit holds for the whole request. The limit of a socket starts anew with each byte, so a server
  that sends one byte per minute would never reach it.
- More than the allowed number of bytes ends the request. No encoding is asked for, and none is undone.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.error import HTTPError

ERROR_BYTES = 2000
# Of the request in each thread: its connections, and the event that its time limit sets.
_current = threading.local()


class TooLargeError(HTTPException):
    """A response of more bytes than allowed."""


def _register(connected: socket.socket) -> None:
    _current.sockets.append(connected)
    if _current.expired.is_set():
        raise TimeoutError("connected too late")


class _Connection(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _register(self.sock)


class _SecureConnection(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _register(self.sock)


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Connection, req)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect is raised as an HTTPError."""


_opener = urllib.request.build_opener(_Handler, _SecureHandler, _NoRedirects)


def post(url: str, data: bytes, headers: Mapping[str, str], *, seconds: float, max_bytes: int) -> bytes:
    """Send a POST request and return the body of the response.

    Raises:
        HTTPError: any status but 2xx; it holds the first `ERROR_BYTES` of the body.
        OSError, HTTPException: no connection, the time limit, or an incomplete or too large response.
    """
    request = urllib.request.Request(url, data, dict(headers))
    with _time_limit(seconds):
        try:
            with _opener.open(request, timeout=seconds) as response:
                body: bytes = response.read(max_bytes + 1)
        except HTTPError as error:
            # Read it here, within the time limit.
            text = io.BytesIO(error.read(ERROR_BYTES))
            raise HTTPError(error.url, error.code, error.msg, error.headers, text) from error
    if len(body) > max_bytes:
        raise TooLargeError(f"more than {max_bytes} bytes")
    return body


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Shut the connections of this thread's request after so many seconds.

    Raises:
        TimeoutError: the limit was reached.
    """
    sockets: list[socket.socket] = []
    expired = threading.Event()
    _current.sockets, _current.expired = sockets, expired

    def shut() -> None:
        expired.set()
        for opened in sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException) as error:
        if expired.is_set():
            raise TimeoutError(f"no complete response within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise TimeoutError(f"no complete response within {seconds:g} s")
