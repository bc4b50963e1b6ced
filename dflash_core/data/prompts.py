"""Prompt sets for evaluation: JSONL whose rows hold `turns`, `prompt` (or `question`) or `messages`.

| shape | prompt |
|---|---|
| `turns`: list of texts (MT-Bench) | each text in turn, after the model's own answers to the earlier ones |
| `prompt` or `question`: text | the text |
| `messages`: role, content | all messages up to the last one that is not the assistant's |

`category` is kept for tables. `question_id`, `task_id` or `id` names the prompt in messages to the user and
is never used as a key.
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
    """The opening of a conversation, and the user's further turns, one after each answer of the model."""

    opening: Messages
    follow_ups: tuple[str, ...] = ()
    category: str | None = None
    name: str = ""

    def messages(self, answers: list[str]) -> Messages | None:
        """Return the conversation after these answers of the model; None when no user turn is left.

        Turns q1, q2: [] -> q1; [a1] -> q1 a1 q2; [a1, a2] -> None.
        """
        if len(answers) > len(self.follow_ups):
            return None
        messages = list(self.opening)
        for answer, question in zip(answers, self.follow_ups):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return messages


def read_prompts(path: Path, *, limit: int | None = None) -> list[ChatPrompt]:
    """Read the first `limit` prompts of a file.

    Raises:
        UserError: the file cannot be read, has no rows, or has a row that is not a prompt (named
            by its line).
    """
    reader = RowReader("messages", DataConfig(), reads=lambda _: True, notes=Counter())
    prompts: list[ChatPrompt] = []
    for row in read_rows(path):
        if len(prompts) == limit:
            break
        if row.value is None:
            continue
        where = f"evaluation.prompts: {path} {row.place}"
        if isinstance(row.value, Rejection):
            raise UserError(f"{where}: {row.value.reason} ({row.value.detail})")
        prompts.append(_prompt(row.value, reader, where))
    if not prompts:
        raise UserError(f"evaluation.prompts: {path} holds no prompts; allowed: at least one row")
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
        texts = turns if isinstance(turns, list) else []
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(
                f"{where}: {turns!r:.80} is not a prompt; allowed: a text, or a list of texts as turns"
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
        raise UserError(f"{where}: messages hold only assistant turns; allowed: at least one user turn")
    return ChatPrompt(messages, (), category, name)
