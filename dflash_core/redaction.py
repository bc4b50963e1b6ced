"""Redaction of secrets in text that leaves the process: messages, logs, error reports, addresses.

Hidden are the values of environment variables whose names say that they hold a secret (`HF_TOKEN`,
`OPENAI_API_KEY`, ...), values that a setting refers to (`add_secret`), user and password of an address, and
what looks like a key, a token or an authorization header. Shell variables (`$TOKEN`) stay readable.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import traceback
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

HIDDEN = "***"
# Shorter values are no secrets worth the name, and would hide parts of ordinary words.
_MIN_CHARACTERS = 8
_SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_STRING)(_|$)"
)
_OTHER_NAME = re.compile(r"_(FILE|PATH|ENV|DIR)$")
# Each pattern keeps its first group and hides the rest.
_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"(://)(?![$*])[^/\s@'\"<>]+(?=@)",
        r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?+)(?![$*])[^\s'\"]+",
        r"(?i)(\bbearer\s+)(?=[^\s'\"]*\d)[\w.~+/=-]{8,}",
        r"(?i)(\bx-[\w-]*(?:key|token)['\"]?\s*:\s*['\"]?)(?![$*])[^\s'\"]+",
        r"(?i)((?<![a-z_])(?:api[_-]?key|(?:access[_-]?)?token|secret|password|passwd)=)(?![$*])[^\s&'\"]{8,}",
        r"(\s(?:-u|--user)[ =]['\"]?[^\s:'\"]+:)(?![$*])[^\s'\"]+",
        r"(hooks\.slack\.com/services/|/api/webhooks/)(?![$*])[^\s'\"]+",
        r"(\b)(?:sk|pk|rk)-[\w-]{16,}",
        r"(\b)(?:hf_|gh[pousr]_|github_pat_|glpat-|AKIA)\w{16,}",
        r"(\b)xox[abeoprs]-[\w-]{10,}",
        r"(\b)eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    )
]
_referred: set[str] = set()


def add_secret(value: str) -> None:
    """Hide a value from now on, whatever its length."""
    if value := value.strip():
        _referred.add(value)


def redact(text: str) -> str:
    """Return the text with every known secret, and whatever looks like one, replaced by `***`."""
    for secret in _known_secrets():
        for form in {secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")}:
            text = text.replace(form, HIDDEN)
    return _redact_patterns(text)


def looks_secret(text: str) -> bool:
    """Return True for text that holds a password, a key or a token by its form alone."""
    return _redact_patterns(text) != text


def _redact_patterns(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def _known_secrets() -> list[str]:
    named = {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name.upper()) and not _OTHER_NAME.search(name.upper())
    }
    secrets = {value for value in named if len(value) >= _MIN_CHARACTERS} | _referred
    # The longest first: one secret may be part of another.
    return sorted(secrets, key=len, reverse=True)


def redact_exception(error: BaseException | None) -> None:
    """Redact the arguments of an exception and of those behind it, in place."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        with contextlib.suppress(AttributeError, TypeError):
            error.args = tuple(_redact_argument(a) for a in error.args)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def redacted_exceptions() -> Iterator[None]:
    """Redact an exception that leaves the body, before somebody records it."""
    try:
        yield
    except Exception as error:
        redact_exception(error)
        raise


def _redact_argument(argument: Any) -> Any:
    return redact(argument) if isinstance(argument, str) else argument


class _RedactedStream:
    """A text stream that hides secrets in each text that is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_output() -> None:
    """Redact what this process prints and logs from now on: remarks, progress, tracebacks."""
    sys.stdout, sys.stderr = _RedactedStream(sys.stdout), _RedactedStream(sys.stderr)  # type: ignore[assignment]
    redact_log_records()


def redact_log_records() -> None:
    """Redact every log record that this process makes from now on, for all handlers; may be called twice."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            # logging itself reports arguments that do not fit their message.
            return record
        redacted = redact(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = redact("".join(traceback.format_exception(record.exc_info[1])).rstrip("\n"))
        return record

    make_redacted.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_redacted)
