"""What regeneration asks and gets: requests, answers, who answers them, and the answers kept on disk."""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_core.data.chat import Rejection

LENGTH = "length"  # finish reason of an answer that the token limit cut

Message = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A conversation that the target is asked to go on with; `key` names prompt, model and settings."""

    key: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    token_ids: list[int]  # of the prompt, by the chat template


@dataclass(frozen=True)
class Answer:
    """An assistant message (role, content, maybe tool_calls and reasoning_content) and how it ended."""

    message: Message
    finish_reason: str  # stop, length or tool_calls
    num_tokens: int  # as generated; 0 where an endpoint does not say


class Generator(Protocol):
    """Whoever writes the answers: `dflash_core.decoding.generate.BatchDecoder`, `endpoint.Endpoint`."""

    identity: dict[str, Any]  # all that decides an answer beside the prompt; JSON types

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """Takes requests out of `pending` and yields each with its answer, in any order, until none is left.

        The caller may add requests whenever something was yielded. A Rejection says that this prompt cannot be
        answered; what is wrong with the whole raises.
        """
        ...


class AnswerCache:
    """Answers by key in one SQLite file, which several processes may share; each is kept once it is put."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
        )

    def get(self, key: str) -> Answer | None:
        """The answer that was put under this key, or None."""
        found = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else Answer(**json.loads(found[0]))

    def put(self, key: str, answer: Answer) -> None:
        """Keeps an answer; it is on disk when this returns."""
        row = (key, json.dumps(asdict(answer)))
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def close(self) -> None:
        self._database.close()
