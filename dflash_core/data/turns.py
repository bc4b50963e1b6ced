"""Turns as data sets write them: their containers, their text, and the marks that exclude them from training.

A turn is not supervised when one of `TRAINING_MARKS` is false or 0:

| mark | written by |
|---|---|
| `weight`: 0 or 1 | OpenAI fine-tuning files |
| `train` or `training`: true or false | axolotl |
| `loss`: true or false | ms-swift |
| `loss_weight`, `train_on_turn` | others |

A loss mask is 0 or 1, so weights other than these supervise the turn like 1 and are counted; a mark that is
neither a number nor true or false rejects the row. The turn stays in the conversation: later turns see it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dflash_core.data.chat import Rejection

TRAINING_MARKS = frozenset(("loss", "loss_weight", "weight", "train", "training", "train_on_turn"))
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_CONTENTS = frozenset(("tool_calls", *REASONING_FIELDS))


class RowError(Exception):
    """A row that cannot be used; carries its rejection."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.rejection = Rejection(reason, detail)


def json_or_none(text: str) -> Any:
    """Return the value of a JSON text, or None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_list(value: Any, name: str) -> list[Any]:
    """Return a list, given as it is, as JSON text, or as a mapping of lists with one entry per turn.

    `datasets` writes a list of mappings as a mapping of lists:
    {"role": ["user", "assistant"], "content": ["q", "a"]} is
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    Raises:
        RowError: the value is none of these, or its lists differ in length.
    """
    if isinstance(value, str):
        value = json_or_none(value)
    if is_columns(value):
        value = _zipped(value, name)
    if not isinstance(value, list):
        raise RowError("wrong shape", f"{name} is not a list")
    return value


def is_columns(value: Any) -> bool:
    """Return True for turns as a mapping of lists, see `as_list`."""
    return isinstance(value, dict) and any(isinstance(value.get(name), list) for name in ("role", "from"))


def _zipped(columns: dict[str, Any], name: str) -> list[dict[str, Any]]:
    filled = {key: entries for key, entries in columns.items() if entries is not None}
    if other := next((key for key, entries in filled.items() if not isinstance(entries, list)), None):
        raise RowError("wrong shape", f"{name}.{other} is not a list, other fields of the turns are")
    lengths = {key: len(entries) for key, entries in filled.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise RowError("wrong shape", f"{name}: the lists of its fields differ in length: {counts}")
    return [dict(zip(filled, entries)) for entries in zip(*filled.values())]


def training_mark(turn: Mapping[str, Any], number: int, notes: Counter[str]) -> bool | None:
    """Return False if a mark of a turn excludes it from training, True if marks include it, None without any.

    Raises:
        RowError: a mark is neither a number >= 0 nor true or false.
    """
    values = {name: turn[name] for name in sorted(TRAINING_MARKS & turn.keys()) if turn[name] is not None}
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or not 0 <= value < math.inf:
            allowed = "true, false or a number >= 0"
            raise RowError("wrong shape", f"turn {number}: {name} is {value!r:.40}; allowed: {allowed}")
    if any(value not in (0, 1) for value in values.values()) and all(values.values()):
        notes["turns with a weight other than 0 and 1 (read as 1)"] += 1
    return all(values.values()) if values else None


def is_blank(message: Mapping[str, Any]) -> bool:
    """Return True if a message holds nothing but white space: no content, tool calls or reasoning."""
    content = message["content"]
    return (not content or content.isspace()) and not any(message.get(name) for name in _CONTENTS)


def text_of(content: Any, where: str) -> str:
    """Return the text of a content: a string, null, or a list of text parts.

    Raises:
        RowError: the content is anything else; `where` names its place in the message.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    raise RowError("content is not text", f"{where}: {type(content).__name__}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowError("content part is not text", f"{where}: {kind!r}")
