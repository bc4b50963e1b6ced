"""Replies of a hostile endpoint: each is one message, in bounded time and memory, and the key stays here."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_core.config import RegenerateConfig
from dflash_core.data import endpoint as module
from dflash_core.data.answers import Request
from dflash_core.data.endpoint import Endpoint
from dflash_core.errors import UserError

Reply = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Calls `reply` for each request, and keeps the headers that it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Reply = lambda handler: None
        self.received: list[dict[str, str]] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.received.append(dict(self.headers))
        self.server.reply(self)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """The endpoint, and another host that it may redirect to."""
    with Server() as first, Server() as second:
        threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in (first, second)]
        for thread in threads:
            thread.start()
        yield first, second
        for server, thread in zip((first, second), threads):
            server.stopped.set()
            server.shutdown()
            thread.join()


def send(status: int, body: bytes, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def completion(**message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()


def failure(server: Server, **settings: Any) -> str:
    """Return the one message of a request."""
    config = RegenerateConfig(base_url=server.url, max_retries=0, **settings)
    client = Endpoint(config, "tiny", api_key="the-key", first_pause_seconds=0.01)
    with pytest.raises(UserError, match=r"^regenerate\.base_url: ") as error:
        client.ask(Request("q", [{"role": "user", "content": "q"}], None, [1]))
    assert "the-key" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_the_key_goes_nowhere(
    servers: tuple[Server, Server], status: int
) -> None:
    first, second = servers
    first.reply = send(status, b"", Location=second.url)
    assert f"answers {status}, a redirect to {second.url}, not followed" in failure(first)
    assert len(first.received) == 1
    assert second.received == []


def test_a_response_over_the_limit_is_not_read(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSE_BYTES", 1000)
    servers[0].reply = send(200, b" " * 2000)
    assert "answers more than 1000 bytes" in failure(servers[0])


@pytest.mark.parametrize("part", ["status", "headers", "body", "error"])
def test_a_reply_that_drips_ends_at_the_time_limit(servers: tuple[Server, Server], part: str) -> None:
    server = servers[0]
    start = {
        "status": b"",
        "headers": b"HTTP/1.1 200 OK\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        "error": b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n",
    }[part]

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while not server.stopped.wait(0.05):
            try:
                handler.wfile.write(b"X")
            except OSError:
                return

    server.reply = drip
    started = time.monotonic()
    assert "no complete response within 0.3 s" in failure(server, timeout_seconds=0.3)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(completion(content="a"), mtime=0),
        completion(content="a").decode().encode("utf-16-le")[:-1],
        b"\xff\xfe\xfa",
        b"[" * 200_000,
        b"",
        b"3",
        completion(content=["a"]),
        completion(content="a", reasoning_content=3),
        completion(content="a", tool_calls=[{"function": 3}]),
        completion(content="a", tool_calls=[{}]),
        completion(content="a", tool_calls={"a": 1}),
        b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": "x"}}',
        b'{"choices": [{"message": {"content": "a"}}], "usage": 3}',
        b'{"choices": {"0": 1}}',
    ],
)
def test_replies_of_other_contents_are_one_message(servers: tuple[Server, Server], body: bytes) -> None:
    servers[0].reply = send(200, body, Content_Type="application/json; charset=utf-7")
    assert "which is not a chat completion" in failure(servers[0])


def test_text_of_the_server_does_not_steer_the_terminal(servers: tuple[Server, Server]) -> None:
    servers[0].reply = send(401, b"\x1b[2J\x07no")
    message = failure(servers[0])
    assert "401 ?[2J?no" in message
    assert message.isprintable()
