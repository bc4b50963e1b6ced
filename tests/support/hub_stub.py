"""A stand-in for the Hugging Face Hub on loopback: data sets with branches, files, a card and gates."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StubDataset:
    """Branches of a data set; a branch's commit is the digest of its files."""

    branches: dict[str, dict[str, bytes]]
    card: dict[str, Any] = field(default_factory=dict)
    gated: Any = False

    def commit(self, branch: str) -> str:
        return hashlib.sha1(repr(sorted(self.branches[branch].items())).encode()).hexdigest()

    def files_at(self, commit: str) -> dict[str, bytes] | None:
        return next((f for b, f in self.branches.items() if self.commit(b) == commit), None)


@dataclass
class StubHub:
    """The data sets by name, and the requests so far as (method, path)."""

    datasets: dict[str, StubDataset] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""

    def downloads(self) -> list[str]:
        """Return the paths of the downloads so far, below the data set's name."""
        gets = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in gets]


def _answer(hub: StubHub, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a request."""
    path = urllib.parse.unquote(path.split("?")[0])
    parts = path.strip("/").split("/")
    is_api = parts[:2] == ["api", "datasets"]
    parts = parts[2:] if is_api else parts[1:]
    dataset = hub.datasets.get("/".join(parts[:2]))
    if dataset is None:
        return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
    if is_api:
        branch = "/".join(parts[3:]) or "main"
        if branch not in dataset.branches:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        info = {
            "id": "/".join(parts[:2]),
            "sha": dataset.commit(branch),
            "gated": dataset.gated,
            "cardData": dataset.card if branch == "main" else None,
            "siblings": [
                {"rfilename": name, "size": len(content)}
                for name, content in dataset.branches[branch].items()
            ],
            "tags": [],
        }
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
    if dataset.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    files = dataset.files_at(parts[3]) or {}
    content = files.get("/".join(parts[4:]))
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    etag = hashlib.sha256(content).hexdigest()
    return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": parts[3], "Accept-Ranges": "bytes"}, content


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    """Serve a stub until the block ends; set HF_ENDPOINT to its `url`."""
    hub = StubHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append((self.command, self.path))
            hub.tokens.append(self.headers.get("Authorization"))
            status, headers, body = _answer(hub, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
