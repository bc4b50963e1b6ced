"""Prompt sets for evaluation: files whose rows hold a prompt, in the shapes of the published sets.

| columns | prompt |
|---|---|
| `turns`: list of texts (MT-Bench) | each text in turn, after the model's own answers to the earlier ones |
| `messages`, `conversations`, `conversation` | the messages up to the last one that is not the assistant's |
| `prompt` (HumanEval), `question` (GSM8K), `problem` (MATH-500) | a text, texts as in `turns`, or messages |
| `instruction`, `input` (Alpaca) | both texts, with an empty line between them |
| `text` (MBPP) | the text |

The first of these columns that is not null decides. `system` becomes the first turn and `tools` is passed to
the template, as in training data; `data.columns` and `data.roles` apply. `category` is kept for tables.
`question_id`, `task_id` or `id` names the prompt in messages to the user and is never used as a key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import Conversation, Rejection
from dflash_core.data.containers import read_rows
from dflash_core.data.formats import TURN_COLUMNS, Row, RowReader, renamed
from dflash_core.data.turns import RowError, as_list, is_columns
from dflash_core.errors import UserError

Messages = list[dict[str, Any]]
_TEXT_COLUMNS = ("prompt", "question", "problem")
_ALLOWED = "turns, messages, prompt, question, problem, instruction or text; other names by data.columns"


@dataclass(frozen=True)
class ChatPrompt:
    """The opening of a conversation, and the user's further turns, one after each answer of the model."""

    opening: Messages
    follow_ups: tuple[str, ...] = ()
    category: str | None = None
    name: str = ""
    tools: list[dict[str, Any]] | None = None

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


def read_prompts(path: Path, data: DataConfig | None = None, *, limit: int | None = None) -> list[ChatPrompt]:
    """Read the first `limit` prompts of a file.

    Args:
        path: JSONL, or any other container of `containers.py`.
        data: `columns` and `roles` are read.
        limit: None: all.

    Raises:
        UserError: the file cannot be read, has no rows, or has a row that is not a prompt (named
            by its line).
    """
    data = data or DataConfig()
    reader = RowReader("messages", DataConfig(roles=data.roles), reads=lambda _: True, notes=Counter())
    prompts: list[ChatPrompt] = []
    for row in read_rows(path):
        if len(prompts) == limit:
            break
        if row.value is None:
            continue
        where = f"evaluation.prompts: {path} {row.place}"
        if isinstance(row.value, Rejection):
            raise UserError(f"{where}: {row.value.reason} ({row.value.detail})")
        prompts.append(_prompt(renamed(row.value, data.columns), reader, where))
    if not prompts:
        raise UserError(f"evaluation.prompts: {path} holds no prompts; allowed: at least one row")
    return prompts


def _prompt(row: Row, reader: RowReader, where: str) -> ChatPrompt:
    try:
        messages, follow_ups = _questions(row)
        conversation = reader.read({**row, "messages": messages})
    except RowError as error:
        conversation = error.rejection
    if isinstance(conversation, Rejection):
        raise UserError(
            f"{where}: {conversation.reason} {conversation.detail}; columns: {', '.join(row)}; "
            f"allowed: {_ALLOWED}"
        )
    assert isinstance(conversation, Conversation)
    opening = conversation.messages
    while opening and opening[-1]["role"] == "assistant":
        opening = opening[:-1]
    if not opening:
        raise UserError(f"{where}: messages hold only assistant turns; allowed: at least one user turn")
    category = None if row.get("category") is None else str(row["category"])
    name = next((str(row[key]) for key in ("question_id", "task_id", "id") if row.get(key) is not None), "")
    return ChatPrompt(opening, tuple(follow_ups), category, name, conversation.tools)


def _questions(row: Row) -> tuple[list[Any], list[str]]:
    """Return the messages that open the conversation, and the texts of the user's further turns.

    Raises:
        RowError: the row holds no prompt.
    """
    if row.get("turns") is not None:
        return _texts_or_messages(row["turns"], "turns")
    for column in TURN_COLUMNS:
        if row.get(column) is not None:
            return as_list(row[column], column), []
    for column in _TEXT_COLUMNS:
        if row.get(column) is not None:
            return _texts_or_messages(row[column], column)
    if row.get("instruction") is not None:
        parts = [row["instruction"], row.get("input") or ""]
        if all(isinstance(part, str) for part in parts):
            return _texts_or_messages("\n\n".join(part for part in parts if part), "instruction")
        return _texts_or_messages(parts, "instruction")
    return _texts_or_messages(row.get("text"), "text")


def _texts_or_messages(value: Any, column: str) -> tuple[list[Any], list[str]]:
    """Return the questions of a text, of a list of texts, or of a list of messages; see `_questions`."""
    if is_columns(value) or isinstance(value, list) and value and isinstance(value[0], dict):
        return as_list(value, column), []
    texts = value if isinstance(value, list) else [value]
    if value is None:
        raise RowError("no prompt")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise RowError(
            "no prompt", f"in {column}: {value!r:.80} is not a text, nor a list of texts or messages"
        )
    return [{"role": "user", "content": texts[0]}], texts[1:]
