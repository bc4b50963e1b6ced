"""Prompt sets for evaluation: JSONL whose rows hold `turns`, `prompt` (or `question`) or `messages`.

| shape | what is asked |
|---|---|
| `turns`: list of texts (MT-Bench) | each in turn, after the model's own answers to those before |
| `prompt` or `question`: text | that |
| `messages`: role, content | all up to the last turn that is not the assistant's |

`category` is kept for tables; `question_id`, `task_id` or `id` names the prompt in messages, never a key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import Conversation, Rejection
from dflash_core.data.containers import read_rows
from dflash_core.data.formats import RowReader
from dflash_core.errors import UserError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation to go on with, and what the user says after each answer of the model."""

    opening: Messages
    follow_ups: tuple[str, ...] = ()
    category: str | None = None
    name: str = ""

    def messages(self, answers: list[str]) -> Messages | None:
        """The conversation after the model's answers so far; None when nothing is left to ask.

        Turns q1, q2: [] -> q1; [a1] -> q1 a1 q2; [a1, a2] -> None.
        """
        if len(answers) > len(self.follow_ups):
            return None
        messages = list(self.opening)
        for answer, question in zip(answers, self.follow_ups):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return messages


def read_prompts(path: Path, *, limit: int | None = None) -> list[ChatPrompt]:
    """The first `limit` prompts of a file.

    Raises:
        UserError: the file cannot be read, a row is no prompt (named by its line), or there is none.
    """
    reader = RowReader("messages", DataConfig(), reads=lambda _: True, notes=Counter())
    prompts: list[ChatPrompt] = []
    for row in read_rows(path):
        if len(prompts) == limit:
            break
        if row.value is None:
            continue
        where = f"evaluation.prompts: {path} line {row.line}"
        if isinstance(row.value, Rejection):
            raise UserError(f"{where}: {row.value.reason} ({row.value.detail})")
        prompts.append(_prompt(row.value, reader, where))
    if not prompts:
        raise UserError(f"evaluation.prompts: {path} holds no prompt; allowed: at least one row")
    return prompts


def _prompt(row: dict[str, Any], reader: RowReader, where: str) -> ChatPrompt:
    category = row.get("category")
    name = next((str(row[key]) for key in ("question_id", "task_id", "id") if row.get(key) is not None), "")
    category = None if category is None else str(category)
    turns = row.get("turns")
    if turns is None and row.get("messages") is None:
        text = row.get("prompt") if row.get("prompt") is not None else row.get("question")
        turns = [text] if text is not None else None
    if turns is not None:
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(t, str) and t.strip() for t in turns)
        ):
            raise UserError(
                f"{where}: {turns!r:.80} is no prompt; allowed: a text, or a list of texts as turns"
            )
        return ChatPrompt([{"role": "user", "content": turns[0]}], tuple(turns[1:]), category, name)
    conversation = reader.read(row)
    if isinstance(conversation, Rejection):
        raise UserError(
            f"{where}: {conversation.reason} {conversation.detail}; columns: {', '.join(row)}; "
            "allowed: turns, prompt, question or messages"
        )
    assert isinstance(conversation, Conversation)
    messages = conversation.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{where}: messages hold no turn but the assistant's; allowed: a user turn to answer")
    return ChatPrompt(messages, (), category, name)
