"""Answers of an OpenAI-compatible endpoint: chat completions, several requests in flight, failed ones repeated.

| the endpoint says | what follows |
|---|---|
| 408, 409, 429, 5xx, no connection, no answer in time | again after 0.5, 1, 2, ... 30 s, or its Retry-After |
| 400, 413, 422, a withheld answer | this prompt is refused, the others go on |
| anything else (401, 403, 404, no chat completion) | one message; answers already on their way are kept |
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any

from dflash_core.config import RegenerateConfig
from dflash_core.data.answers import Answer, Message, Request
from dflash_core.data.chat import Rejection
from dflash_core.errors import UserError

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
_PASSING = (408, 409, 429)
_REFUSED = (400, 413, 422)


class _StoppedError(Exception):
    """A request given up because another one showed that none can succeed."""


class Endpoint:
    """Asks `config.base_url`; see the module's docstring.

    Args:
        config: `base_url` must be set.
        model: the model's name there.
        api_key: sent as a bearer token, when there is one; never stored.
        first_pause_seconds: before the first repetition; doubled for each further one.
    """

    def __init__(
        self,
        config: RegenerateConfig,
        model: str,
        *,
        api_key: str | None = None,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        assert config.base_url is not None
        self.config, self.model = config, model
        self.url = config.base_url.rstrip("/") + "/chat/completions"
        self.sampling = {
            "temperature": config.temperature,
            "seed": config.seed,
            "max_tokens": config.max_new_tokens,
        }
        self.identity = {"model": model, "base_url": config.base_url, **self.sampling}
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._first_pause = first_pause_seconds
        self._stopped = threading.Event()

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """Answers as they come, at most `concurrency` requests in flight.

        Raises:
            UserError: the endpoint cannot be used, or fails a request too often.
        """
        failure: UserError | None = None
        flying: dict[Future[Answer | Rejection], Request] = {}
        pool = ThreadPoolExecutor(self.config.concurrency)
        try:
            while flying or (pending and failure is None):
                while pending and failure is None and len(flying) < self.config.concurrency:
                    request = pending.popleft()
                    flying[pool.submit(self.ask, request)] = request
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    request = flying.pop(future)
                    try:
                        answer = future.result()
                    except (UserError, _StoppedError) as error:
                        failure = failure or (error if isinstance(error, UserError) else None)
                        self._stopped.set()
                        continue
                    yield request, answer
        finally:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if failure is not None:
            raise failure

    def ask(self, request: Request) -> Answer | Rejection:
        """One request, repeated while the endpoint's trouble may pass.

        Raises:
            UserError: the endpoint cannot be used, or failed `max_retries` + 1 times.
        """
        body: dict[str, Any] = {"model": self.model, "messages": wire_messages(request.messages)}
        if request.tools:
            body["tools"] = request.tools
        data = json.dumps({**body, **self.sampling}).encode()
        for attempt in range(self.config.max_retries + 1):
            pause = min(LONGEST_PAUSE_SECONDS, self._first_pause * 2**attempt)
            try:
                http = urllib.request.Request(self.url, data, self._headers)
                with urllib.request.urlopen(http, timeout=self.config.timeout_seconds) as response:
                    return self._answer(response.read())
            except urllib.error.HTTPError as error:
                said = f"{error.code} {' '.join(error.read(2000).decode(errors='replace').split())[:300]}"
                if error.code in _REFUSED:
                    return Rejection("endpoint refuses the prompt", said)
                if error.code not in _PASSING and error.code < 500:
                    raise self._unusable(f"answers {said}") from error
                pause = _retry_after(error.headers.get("Retry-After")) or pause
            except (OSError, HTTPException) as error:  # no connection, no answer in time, one that breaks off
                said = f"{type(error).__name__}: {error}"
            if attempt < self.config.max_retries and self._stopped.wait(pause):
                raise _StoppedError
        raise self._unusable(f"failed {self.config.max_retries + 1} times, at last with {said}")

    def _answer(self, body: bytes) -> Answer | Rejection:
        try:
            completion = json.loads(body)
            choice = completion["choices"][0]
            told, reason = choice["message"], choice.get("finish_reason") or "stop"
            usage = completion.get("usage") or {}
            message: Message = {"role": "assistant", "content": told.get("content") or ""}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._unusable(f"answers {body[:120]!r}, which is no chat completion") from error
        if reason not in ("stop", "length", "tool_calls"):
            return Rejection("endpoint withholds the answer", f"finish_reason {reason!r}")
        if told.get("tool_calls"):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in told["tool_calls"]]
            reason = "tool_calls" if reason == "stop" else reason
        if thought := told.get("reasoning_content") or told.get("reasoning"):
            message["reasoning_content"] = thought
        return Answer(message, reason, int(usage.get("completion_tokens") or 0))

    def _unusable(self, what: str) -> UserError:
        return UserError(
            f"regenerate.base_url: {self.config.base_url!r} with model {self.model!r} {what}; allowed: a running "
            f"OpenAI-compatible endpoint that serves this model, its key in ${self.config.api_key_env}"
        )


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, at most the longest pause; None without one or for a date."""
    return min(float(value), LONGEST_PAUSE_SECONDS) if value and value.strip().isdigit() else None


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object where their text is one: chat templates print objects."""
    function = dict(call["function"])
    try:
        parsed = json.loads(function["arguments"])
    except (ValueError, TypeError):
        return call
    return {
        **call,
        "function": {**function, "arguments": parsed if isinstance(parsed, dict) else function["arguments"]},
    }


def wire_messages(messages: list[Message]) -> list[Message]:
    """Messages as the protocol wants them: arguments of tool calls as JSON text, and an id for every call.

    A tool message without an id answers the calls before it in turn: call_0, call_1, ...
    """
    out: list[Message] = []
    calls: deque[str] = deque()
    number = 0
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls.clear()
            wired = []
            for call in message["tool_calls"]:
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                calls.append(call.get("id") or f"call_{number}")
                function = {**call["function"], "arguments": text}
                wired.append({"type": "function", "id": calls[-1], "function": function})
                number += 1
            message["tool_calls"] = wired
        elif message["role"] == "tool" and message.get("tool_call_id") is None:
            message["tool_call_id"] = calls.popleft() if calls else "call_0"
        out.append(message)
    return out
