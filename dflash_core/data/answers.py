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

SCHEMA = "CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
# Of one stored answer: its text and ids.
MAX_ANSWER_BYTES = 256 << 20

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
    """Answers by key in one SQLite file, which several processes may share.

    The file may have been copied from elsewhere. It holds one table and nothing else: no views, triggers or
    functions of a foreign schema are run, and a value that is no answer is not used.

    Args:
        path: of the file; made if it does not exist.

    Raises:
        UserError: it is damaged, locked, or not a file of answers. So do `get` and `put`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        check_database(path, REMEDY)
        self._errors = functools.partial(database_errors, path, REMEDY)
        with self._errors():
            self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._database.close()
                raise

    def _open(self) -> None:
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ANSWER_BYTES)
        self._database.execute("PRAGMA trusted_schema = OFF")
        self._database.execute("PRAGMA cell_size_check = ON")
        self._database.execute(SCHEMA.replace("TABLE", "TABLE IF NOT EXISTS", 1))
        found = self._database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if found != [(SCHEMA,)]:
            raise sqlite3.DatabaseError(f"it is no store of answers, it holds {found!r:.200}")

    def get(self, key: str) -> Answer | None:
        """Return the answer stored under this key, or None; a damaged answer is asked for again."""
        with self._errors():
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else _answer(row[0])

    def put(self, key: str, answer: Answer) -> None:
        """Store an answer; it is on disk when this returns."""
        row = (key, json.dumps(asdict(answer)))
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def close(self) -> None:
        self._database.close()


def _answer(text: Any) -> Answer | None:
    """Return a stored answer, or None where the text is none."""
    try:
        answer = Answer(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    message, ids = answer.message, answer.token_ids
    is_sound = isinstance(message, dict) and isinstance(message.get("content"), str)
    is_sound = is_sound and message.get("role") == "assistant" and isinstance(answer.finish_reason, str)
    is_sound = is_sound and type(answer.num_tokens) is int
    if not is_sound or not (ids is None or isinstance(ids, list) and all(type(i) is int for i in ids)):
        return None
    return answer
