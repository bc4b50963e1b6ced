"""Detection of a file's format by the columns of its first rows.

The format is that of most rows. A file whose rows are mostly of another kind of data (preference pairs,
message trees, prompts without answers) is rejected as a whole, with the columns seen and the formats
accepted. Rows with images or other media are rejected one by one, by their reader.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.formats import (
    RESPONSE_COLUMNS,
    ROLES,
    TURN_COLUMNS,
    Row,
    renamed,
)
from dflash_core.data.turns import RowError, as_list
from dflash_core.errors import UserError

ACCEPTED = (
    "messages (role, content); conversations (from, value); instruction, input, output or response; "
    "prompt, response; input_ids, loss_mask; other names by data.columns"
)


def detect_format(rows: Iterable[Row], config: DataConfig, *, source: str, answered: bool = True) -> str:
    """Return the format of a file by the columns of its first rows (the caller passes at most 100).

    Args:
        rows: the first rows that could be parsed.
        config: a `format` other than auto is returned unchanged; `columns` are applied first.
        source: the file's name, for messages.
        answered: reject a file of prompts without answers.

    Raises:
        UserError: the file holds something else; the message names the columns seen and the formats accepted.
    """
    if config.format not in ("auto", "stdlib"):
        return config.format
    rows = [renamed(row, config.columns) for row in rows]
    columns = ", ".join(repr(name)[1:-1] for name in list(dict.fromkeys(itertools.chain(*rows)))[:20])
    votes = Counter(name for row in rows if (name := _format_of(row, answered=answered)))
    best = votes.most_common(1)[0][0] if votes else None
    kind = _other_kind(rows, sum(votes.values()))
    if kind is None and answered and _no_answers(rows, best, config.roles):
        raise UserError(
            f"data.files: {source!r} holds prompts only; columns seen: {columns}; accepted: {ACCEPTED}. "
            "To let the target answer them, set regenerate.enabled: true; if it does hold answers, set "
            "data.format or data.columns"
        )
    if kind:
        raise UserError(
            f"data.files: {source!r} holds {kind}; columns seen: {columns}; accepted: {ACCEPTED}. "
            "If it does hold conversations, set data.format"
        )
    if best is None:
        raise UserError(
            f"data.files: {source!r} has no known format; columns seen: {columns or 'none'}; "
            f"accepted: {ACCEPTED}"
        )
    return best


def _other_kind(rows: Iterable[Row], num_known: int) -> str | None:
    """Return the kind of data that most rows hold and that only looks like conversations, if there is one.

    Args:
        rows: the first rows.
        num_known: number of them whose columns are those of a format.
    """
    kinds = Counter(kind for row in rows if (kind := _kind_of(row)))
    kind, count = kinds.most_common(1)[0] if kinds else (None, 0)
    return kind if 2 * count > num_known else None


def _kind_of(row: Row) -> str | None:
    """Return the kind of a row that only looks like a conversation; None for any other row."""
    if all(row.get(name) not in (None, "", [], {}) for name in ("chosen", "rejected")):
        return "preference pairs"
    trees = ({"message_tree_id", "parent_id"}, {"prompt", "replies"}, {"mapping"})
    return "message trees" if any(names <= row.keys() for names in trees) else None


def _no_answers(rows: Iterable[Row], format_name: str | None, roles: Mapping[str, str]) -> bool:
    """Return True for prompts without a column of answers, and turns none of which is the assistant's.

    Turns of unknown roles may be the assistant's.
    """
    if format_name is None:
        return any(_format_of(row, answered=False) for row in rows)
    if format_name not in ("messages", "sharegpt"):
        return False
    known = {**ROLES, **roles}
    turns = [turn for row in rows for turn in _turns_of(row)]
    names = [isinstance(turn, dict) and (turn.get("role") or turn.get("from")) for turn in turns]
    return all(isinstance(name, str) and known.get(name, "assistant") != "assistant" for name in names)


def _format_of(row: Row, *, answered: bool) -> str | None:
    if row.get("input_ids") is not None and row.get("loss_mask") is not None:
        return "tokenised"
    turns = _turns_of(row)
    if turns and isinstance(turns[0], dict):
        return "sharegpt" if "from" in turns[0] and turns[0].get("role") is None else "messages"
    if "instruction" in row and (not answered or "output" in row or "response" in row):
        return "alpaca"
    is_answered = any(column in row for column in RESPONSE_COLUMNS)
    if ("prompt" in row or "question" in row) and (is_answered or not answered):
        return "prompt_response"
    return None


def _turns_of(row: Row) -> list[Any]:
    """Return the turns of a row of messages if they are a list, else no turns."""
    for column in TURN_COLUMNS:
        value = row.get(column)
        if not value:
            continue
        try:
            turns = as_list(value, column)
        except RowError:
            continue
        if turns:
            return turns
    return []
