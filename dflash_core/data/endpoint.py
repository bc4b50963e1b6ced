"""Answers of an OpenAI-compatible endpoint: chat completions, several in flight, failed requests retried.

| response | consequence |
|---|---|
| 408, 409, 429, 5xx, no connection, timeout | retried after 0.5, 1, 2, ... 30 s, or after its Retry-After |
| 400, 413, 422, a withheld answer | this prompt is rejected, the others continue |
| anything else (401, 403, 404, a redirect, not a chat completion) | one error; answers in flight are kept |

An endpoint need not be trusted: see `http_post.py` for the limits of a request, and `_answer` for the types.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from dflash_core.config import RegenerateConfig
from dflash_core.data.answers import Answer, Message, Request
from dflash_core.data.chat import Rejection
from dflash_core.data.http_post import TooLargeError, post
from dflash_core.errors import UserError
from dflash_core.redaction import redact

# Of one response; an answer of 100,000 tokens has about half a megabyte.
MAX_RESPONSE_BYTES = 32 << 20
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
_RETRIED_STATUS = (408, 409, 429)
_REJECTED_STATUS = (400, 413, 422)


class _StoppedError(Exception):
    """A request that was given up because another one showed that none can succeed."""


class Endpoint:
    """Generator that asks `config.base_url`; see the module's docstring.

    Args:
        config: `base_url` must be set.
        model: name of the model at the endpoint.
        api_key: sent as a bearer token if given; never stored.
        stop_token_ids: end answers too, for an end of turn that only the chat template knows. vLLM and SGLang
            read them; not sent if there are none, because other endpoints may reject the field.
        template_arguments: `data.template_arguments`, sent as `chat_template_kwargs` if there are any.
        first_pause_seconds: pause before the first retry; doubled for each further one.
    """

    def __init__(
        self,
        config: RegenerateConfig,
        model: str,
        *,
        api_key: str | None = None,
        stop_token_ids: Sequence[int] = (),
        template_arguments: Mapping[str, Any] | None = None,
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
        self._extras: dict[str, Any] = {}
        if stop_token_ids:
            self._extras["stop_token_ids"] = list(stop_token_ids)
        if template_arguments:
            self._extras["chat_template_kwargs"] = dict(template_arguments)
        self.identity = {"model": model, "base_url": config.base_url, **self.sampling, **self._extras}
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._first_pause = first_pause_seconds
        self._stopped = threading.Event()

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """Yield answers as they arrive, with at most `concurrency` requests in flight.

        Raises:
            UserError: the endpoint cannot be used, or failed a request too often.
        """
        failure: UserError | None = None
        in_flight: dict[Future[Answer | Rejection], Request] = {}
        pool = ThreadPoolExecutor(self.config.concurrency)
        try:
            while in_flight or (pending and failure is None):
                while pending and failure is None and len(in_flight) < self.config.concurrency:
                    request = pending.popleft()
                    in_flight[pool.submit(self.ask, request)] = request
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    request = in_flight.pop(future)
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
        """Send one request, and retry it while the failure may be temporary.

        Raises:
            UserError: the endpoint cannot be used, or failed `max_retries` + 1 times.
        """
        fields: dict[str, Any] = {"model": self.model, "messages": wire_messages(request.messages)}
        if request.tools:
            fields["tools"] = request.tools
        data = json.dumps({**fields, **self.sampling, **self._extras}).encode()
        for attempt in range(self.config.max_retries + 1):
            pause = min(LONGEST_PAUSE_SECONDS, self._first_pause * 2**attempt)
            try:
                seconds = self.config.timeout_seconds
                body = post(self.url, data, self._headers, seconds=seconds, max_bytes=MAX_RESPONSE_BYTES)
                return self._answer(body)
            except HTTPError as error:
                reported = f"{error.code} {_printable(error.read())}"
                if error.code in _REJECTED_STATUS:
                    return Rejection("prompt rejected by the endpoint", reported)
                if location := error.headers.get("Location"):
                    reported = f"{error.code}, a redirect to {_printable(location.encode())}, not followed"
                if error.code not in _RETRIED_STATUS and error.code < 500:
                    raise self._unusable(f"answers {reported}") from error
                pause = _retry_after(error.headers.get("Retry-After")) or pause
            except TooLargeError as error:
                raise self._unusable(f"answers {error}") from error
            except (OSError, HTTPException) as error:
                # No connection, a timeout, or an incomplete response.
                reported = f"{type(error).__name__}: {error}"
            if attempt < self.config.max_retries and self._stopped.wait(pause):
                raise _StoppedError
        raise self._unusable(f"failed {self.config.max_retries + 1} times, the last time with {reported}")

    def _answer(self, body: bytes) -> Answer | Rejection:
        try:
            completion = json.loads(body)
            choice = completion["choices"][0]
            received, reason = choice["message"], choice.get("finish_reason") or "stop"
            usage = completion.get("usage") or {}
            message: Message = {"role": "assistant", "content": _text(received.get("content"))}
            calls = [_with_parsed_arguments(call) for call in received.get("tool_calls") or ()]
            reasoning = _text(received.get("reasoning_content") or received.get("reasoning"))
            num_tokens = int(usage.get("completion_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = _printable(body)[:120]
            raise self._unusable(f"answers {shown!r}, which is not a chat completion") from error
        if reason not in ("stop", "length", "tool_calls"):
            return Rejection("answer withheld by the endpoint", f"finish_reason {reason!r:.80}")
        if calls:
            message["tool_calls"] = calls
            reason = "tool_calls" if reason == "stop" else reason
        if reasoning:
            message["reasoning_content"] = reasoning
        return Answer(message, reason, num_tokens)

    def _unusable(self, failure: str) -> UserError:
        return UserError(
            f"regenerate.base_url: {self.config.base_url!r} with model {self.model!r} {failure}; allowed: a "
            "running OpenAI-compatible endpoint that serves this model, with its key in "
            f"${self.config.api_key_env}"
        )


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, at most the longest pause; None if absent or a date."""
    return min(float(value), LONGEST_PAUSE_SECONDS) if value and value.strip().isdigit() else None


def _printable(text: bytes) -> str:
    """Return the beginning of a server's text on one line, without what steers a terminal."""
    line = " ".join(redact(text.decode(errors="replace")).split())[:300]
    return "".join(character if character.isprintable() else "?" for character in line)


def _text(value: Any) -> str:
    """Return a text of a response, "" for none.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, str | None):
        raise TypeError(f"{type(value).__name__} for a text")
    return value or ""


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the tool call with its arguments parsed if they hold an object: chat templates print objects.

    Raises:
        LookupError, TypeError, ValueError: it is not a tool call.
    """
    function = dict(call["function"])
    _text(function["name"])
    try:
        parsed = json.loads(function["arguments"])
    except (ValueError, TypeError, RecursionError):
        return call
    if isinstance(parsed, dict):
        function["arguments"] = parsed
    return {**call, "function": function}


def wire_messages(messages: list[Message]) -> list[Message]:
    """Return messages as the protocol requires: tool call arguments as JSON text, and an id for every call.

    Tool messages without an id answer the preceding calls in order: call_0, call_1, ...
    """
    out: list[Message] = []
    calls: deque[str] = deque()
    number = 0
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls.clear()
            wire_calls = []
            for call in message["tool_calls"]:
                arguments = call["function"]["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                calls.append(call.get("id") or f"call_{number}")
                function = {**call["function"], "arguments": text}
                wire_calls.append({"type": "function", "id": calls[-1], "function": function})
                number += 1
            message["tool_calls"] = wire_calls
        elif message["role"] == "tool" and message.get("tool_call_id") is None:
            message["tool_call_id"] = calls.popleft() if calls else "call_0"
        out.append(message)
    return out
