"""Requests and answers of regeneration, the interface of generators, and the cache of answers on disk."""

from __future__ import annotations

import functools
import json
import sqlite3
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_core.data.chat import Rejection
from dflash_core.databases import check_database, database_errors

# Finish reason of an answer that was cut at the token limit.
LENGTH = "length"
# Next step where the database of answers is damaged.
REMEDY = (
    "restore it from a copy, save what can be read (`sqlite3 FILE .recover`), or remove it: prompts whose "
    "files are not finished are then answered again"
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A conversation for the target to continue; `key` is a digest of prompt, model and settings."""

    key: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    # Of the prompt, by the chat template.
    token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """An assistant message (role, content, optional tool_calls, reasoning_content) and its finish reason."""

    message: Message
    # One of stop, length, tool_calls.
    finish_reason: str
    # Generated tokens; 0 where an endpoint does not report them.
    num_tokens: int
    # The tokens themselves, an end token included; None where only the text is known.
    token_ids: list[int] | None = None


class Generator(Protocol):
    """Interface of answer generators: `dflash_core.decoding.generate.BatchDecoder`, `endpoint.Endpoint`."""

    # Everything that determines an answer apart from the prompt; JSON types.
    identity: dict[str, Any]

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """Take requests out of `pending` and yield each with its answer, in any order, until none is left.

        The caller may add requests after each answer. A Rejection means that this one prompt cannot be
        answered; an error that concerns all prompts is raised.
        """
        ...


class AnswerCache:
    """Answers by key in one SQLite file, which several processes may share."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_database(path, REMEDY)
        self._errors = functools.partial(database_errors, path, REMEDY)
        with self._errors():
            self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )

    def get(self, key: str) -> Answer | None:
        """Return the answer stored under this key, or None."""
        with self._errors():
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        try:
            return None if row is None else Answer(**json.loads(row[0]))
        # A damaged answer is asked for again.
        except (ValueError, TypeError):
            return None

    def put(self, key: str, answer: Answer) -> None:
        """Store an answer; it is on disk when this returns."""
        row = (key, json.dumps(asdict(answer)))
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def close(self) -> None:
        self._database.close()
