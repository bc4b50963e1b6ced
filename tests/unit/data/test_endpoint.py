"""Chat completions over HTTP, against a server on loopback that counts, fails and rejects on request."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import RegenerateConfig, RunConfig, from_dict
from dflash_core.data.answers import Answer, Request
from dflash_core.data.chat import Rejection
from dflash_core.data.endpoint import Endpoint, wire_messages
from dflash_core.errors import UserError


class Server(ThreadingHTTPServer):
    """Answers "a to Q"; `fails` are status codes to give first, `rejects` questions get 400."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fails: deque[int] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.most_busy = 0
        self.lock, self.delay = threading.Lock(), 0.0
        self.choice: dict[str, Any] = {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append({"path": self.path, **body})
            server.keys.append(self.headers.get("Authorization"))
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            status = server.fails.popleft() if server.fails else 200
        time.sleep(server.delay)
        question = body["messages"][-1]["content"]
        if "too long" in question:
            status = 400
        message = {"role": "assistant", "content": f"a to {question}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", **server.choice}
        answer = (
            {"choices": [choice], "usage": {"completion_tokens": 5}} if status == 200 else {"error": "no"}
        )
        with server.lock:
            server.busy -= 1
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def endpoint(server: Server, **settings: Any) -> Endpoint:
    config = RegenerateConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", **settings)
    return Endpoint(config, "tiny", api_key="secret", first_pause_seconds=0.01)


def requests(*questions: str) -> deque[Request]:
    return deque(Request(q, [{"role": "user", "content": q}], None, [1]) for q in questions)


def test_request_and_answer(server: Server) -> None:
    client = endpoint(server, temperature=0.7, seed=3, max_new_tokens=9)
    [(request, answer)] = client.answers(requests("q"))
    assert request.key == "q"
    assert answer == Answer({"role": "assistant", "content": "a to q"}, "stop", 5)
    sampling = {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    messages = [{"role": "user", "content": "q"}]
    assert server.bodies == [
        {"path": "/v1/chat/completions", "model": "tiny", "messages": messages, **sampling}
    ]
    assert server.keys == ["Bearer secret"]
    assert "secret" not in json.dumps(client.identity)


def test_an_end_of_turn_that_engines_do_not_know_and_template_arguments_are_sent(server: Server) -> None:
    config = RegenerateConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1")
    extras = {"stop_token_ids": [2], "chat_template_kwargs": {"enable_thinking": False}}
    client = Endpoint(config, "tiny", stop_token_ids=[2], template_arguments={"enable_thinking": False})
    list(client.answers(requests("q")))
    assert {name: server.bodies[0].get(name) for name in extras} == extras
    assert client.identity == {**Endpoint(config, "tiny").identity, **extras}


def test_temporary_failures_are_retried(server: Server) -> None:
    server.fails.extend([500, 429, 503])
    [(_, answer)] = endpoint(server).answers(requests("q"))
    assert isinstance(answer, Answer)
    assert len(server.bodies) == 4
    server.fails.extend([500] * 3)
    with pytest.raises(UserError, match="regenerate.base_url: .*failed 3 times, the last time with 500"):
        list(endpoint(server, max_retries=2).answers(requests("q")))


def test_a_wrong_key_gives_one_message_and_no_retry(server: Server) -> None:
    server.fails.extend([401] * 100)
    with pytest.raises(UserError, match=r"base_url: .*answers 401 .*allowed: .*key in \$OPENAI_API_KEY"):
        list(endpoint(server, concurrency=4).answers(requests(*"abcdefghijklmnop")))
    assert len(server.bodies) <= 4


def test_answers_in_flight_are_kept_when_another_fails(server: Server) -> None:
    server.fails.extend([200, 403])
    server.delay = 0.1
    kept = []
    with pytest.raises(UserError, match="answers 403"):
        for request, _ in endpoint(server, concurrency=2).answers(requests("a", "b", "c", "d")):
            # Not a comprehension: it would lose the answers before the failure.
            kept.append(request.key)
    assert len(kept) >= 1
    assert len(kept) == len(server.bodies) - 1


def test_a_rejected_prompt_does_not_stop_the_others(server: Server) -> None:
    answers = {r.key: a for r, a in endpoint(server).answers(requests("q", "too long", "r"))}
    rejected = answers.pop("too long")
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "prompt rejected by the endpoint"
    assert all(isinstance(answer, Answer) for answer in answers.values())
    assert len(answers) == 2


def test_requests_in_flight_are_bounded_and_new_ones_join(server: Server) -> None:
    server.delay = 0.02
    pending, answered = requests(*"abcdefgh"), 0
    for request, _ in endpoint(server, concurrency=3).answers(pending):
        answered += 1
        if len(request.key) == 1:
            pending.extend(requests(request.key * 2))
    assert (answered, server.most_busy) == (16, 3)


def test_finish_reasons_and_tool_calls_of_answers(server: Server) -> None:
    server.choice = {"finish_reason": "length"}
    [(_, answer)] = endpoint(server).answers(requests("q"))
    assert isinstance(answer, Answer)
    assert answer.finish_reason == "length"
    server.choice = {"finish_reason": "content_filter"}
    [(_, answer)] = endpoint(server).answers(requests("q"))
    assert answer == Rejection("answer withheld by the endpoint", "finish_reason 'content_filter'")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    server.choice = {"message": {"content": None, "tool_calls": [call], "reasoning_content": "hm"}}
    [(_, answer)] = endpoint(server).answers(requests("q"))
    assert isinstance(answer, Answer)
    assert answer.finish_reason == "tool_calls"
    assert answer.message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (answer.message["content"], answer.message["reasoning_content"]) == ("", "hm")


def test_responses_that_are_not_chat_completions(server: Server) -> None:
    server.choice = {"message": None}
    with pytest.raises(UserError, match="not a chat completion"):
        list(endpoint(server).answers(requests("q")))
    config = RegenerateConfig(base_url="http://127.0.0.1:9/v1", max_retries=0)
    with pytest.raises(UserError, match="failed 1 times, the last time with URLError"):
        list(Endpoint(config, "tiny").answers(requests("q")))


def test_tool_calls_get_ids_and_arguments_as_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call, call]}]
    messages += [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    sent = wire_messages(messages)
    assert [c["id"] for c in sent[0]["tool_calls"]] == ["call_0", "call_1"]
    assert sent[0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'
    assert [m["tool_call_id"] for m in sent[1:]] == ["call_0", "call_1"]
    assert "id" not in call


def test_the_stage_asks_the_endpoint(
    server: Server, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.ingest import Source
    from tasks.regenerate import regenerate, regenerate_inputs, where_of
    from tasks.storage.file_digests import FileDigests

    monkeypatch.setenv("A_KEY", "key-of-a-test")
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x", "prompt": "q", "response": "old"}) + "\n")
    base_url = f"http://127.0.0.1:{server.server_port}/v1"
    settings = {"enabled": True, "base_url": base_url, "model": "served", "api_key_env": "A_KEY"}
    arguments = {"enable_thinking": False}
    config = from_dict(RunConfig, {"regenerate": settings, "data": {"template_arguments": arguments}})
    source = Source(str(tmp_path / "a.jsonl"), FileDigests(tmp_path).of(tmp_path / "a.jsonl"))
    target = {"fingerprint": "f", "tokenizer_fingerprint": "t"}
    inputs = regenerate_inputs(config, source, target=target, digests=FileDigests(tmp_path))
    (tmp_path / "out").mkdir()
    pointer = regenerate.write(
        tmp_path / "out", **inputs, where=where_of(config, source, tmp_path, tiny_target_dir)
    )
    [line] = (tmp_path / "out" / pointer["file"]).read_text().splitlines()
    row = json.loads(line)
    assert (row["id"], row["messages"][1]["content"]) == ("x", "a to q")
    assert (row["regenerated_by"]["model"], row["regenerated_by"]["base_url"]) == ("served", base_url)
    assert server.keys == ["Bearer key-of-a-test"]
    assert server.bodies[0]["chat_template_kwargs"] == arguments
    # The target's generation config names the end of turn of its template.
    assert "stop_token_ids" not in server.bodies[0]
    assert pointer["num_tokens"] == 5
