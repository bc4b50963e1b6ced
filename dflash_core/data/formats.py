"""What the columns of a file mean: detection of the format, and rows of any format to conversations.

| format | columns | notes |
|---|---|---|
| messages | `messages` (or `conversation`, `conversations`): role, content | list or JSON string |
| sharegpt | `conversations` (or `conversation`, `messages`): from, value | human, gpt, observation |
| alpaca | `instruction`, `input`, and `output` or `response` | `system` and `history` too |
| prompt_response | `prompt` or `question`, and `response`, `completion`, `answer` | or lists of messages |
| tokenised | `input_ids`, `loss_mask` | no template; ids and mask as they are |

`data.columns` names other columns: {"instruction": "task", "output": "code"}; rows without such a column are
counted. Rules that hold for all formats:
- `content: null` is empty text, a turn without `content` or `value` refuses the row unless it calls tools; a
  list of text parts is their concatenation; any other part refuses the row.
- Roles are system, user, assistant and tool, and the known names in `ROLES`; any other refuses the row unless
  `data.roles` maps it. No turn is ever skipped.
- Tool calls keep their arguments, an object or a string of one; calls that are no JSON, or of another role than
  the assistant's, refuse the row; so does a template that renders no `tool_calls`, except for ShareGPT's
  `function_call`, whose value is the text that the assistant wrote.
- Reasoning fields are dropped (`data.reasoning: drop`) or handed to the template under the names it reads
  (`keep`).
- `open_end: true` on an assistant turn says that it was cut: see `Conversation.open_ends`.
- `rejection` in place of a conversation is an earlier stage's refusal, kept as it is.
- A row with images or other media is refused, unless `data.format` is named.
- Other columns play no part; row ids are not keys.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import Conversation, Rejection
from dflash_core.errors import UserError

Row = Mapping[str, Any]
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool",
}  # fmt: skip
TURN_COLUMNS = ("messages", "conversations", "conversation")
RESPONSE_COLUMNS = ("response", "completion", "answer", "output")
MEDIA_COLUMNS = frozenset(("image", "images", "video", "videos", "audio", "audios", "pixel_values"))
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ACCEPTED = (
    "messages (role, content); conversations (from, value); instruction, input, output or response; "
    "prompt, response; input_ids, loss_mask; other names by data.columns"
)


class RefusedRowError(Exception):
    """A row that cannot be used; carries the rejection."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.rejection = Rejection(reason, detail)


@dataclass(frozen=True)
class Tokens:
    """A row that came tokenised."""

    token_ids: Any
    loss_mask: Any


def detect_format(rows: Iterable[Row], config: DataConfig, *, source: str, answered: bool = True) -> str:
    """The format of a file by the columns of its first rows (at most 100 are looked at by the caller).

    Args:
        rows: first rows that could be parsed.
        config: `format` other than auto is returned as it is; `columns` are applied before looking.
        source: the file's name, for messages.
        answered: a file of prompts without answers is refused.

    Raises:
        UserError: the file is something else; names the columns seen and what is accepted.
    """
    if config.format not in ("auto", "stdlib"):
        return config.format
    rows = [_mapped(row, config.columns) for row in rows]
    columns = ", ".join(repr(name)[1:-1] for name in list(dict.fromkeys(itertools.chain(*rows)))[:20])
    votes = Counter(name for row in rows if (name := _format_of(row)))
    best = votes.most_common(1)[0][0] if votes else None
    kind = _other_kind(rows) or (answered and _no_answers(rows, best, config.roles) and "prompts only")
    if kind:
        raise UserError(
            f"data.files: {source!r} holds {kind}; columns seen: {columns}; accepted: {ACCEPTED}. "
            "If it holds conversations all the same, name data.format"
        )
    if best is None:
        raise UserError(
            f"data.files: {source!r} has no known format; columns seen: {columns or 'none'}; "
            f"accepted: {ACCEPTED}"
        )
    return best


def _other_kind(rows: Iterable[Row]) -> str | None:
    """A kind of data that would parse as conversations and is not one."""
    columns = {name for row in rows for name in row}
    filled = {name for row in rows for name, value in row.items() if value not in (None, "", [], {})}
    if {"chosen", "rejected"} <= filled:
        return "preference pairs"
    if filled & MEDIA_COLUMNS:
        return "images or other media"
    if (
        {"message_tree_id", "parent_id"} <= columns
        or {"prompt", "replies"} <= columns
        or "mapping" in columns
    ):
        return "message trees"
    return None


def _no_answers(rows: Iterable[Row], format_name: str | None, roles: Mapping[str, str]) -> bool:
    """Whether all turns are known to be another's than the assistant's."""
    if format_name not in ("messages", "sharegpt"):
        return False
    known = {**ROLES, **roles}
    turns = [turn for row in rows for turn in _turns_of(row)]
    names = [isinstance(turn, dict) and (turn.get("role") or turn.get("from")) for turn in turns]
    return all(isinstance(name, str) and known.get(name, "assistant") != "assistant" for name in names)


def _mapped(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the user's column names put under the format's."""
    if not columns:
        return row
    return {**row, **{ours: row.get(theirs) for ours, theirs in columns.items() if theirs in row}}


def _format_of(row: Row) -> str | None:
    if row.get("input_ids") is not None and row.get("loss_mask") is not None:
        return "tokenised"
    turns = _turns_of(row)
    if turns and isinstance(turns[0], dict):
        return "sharegpt" if "from" in turns[0] and turns[0].get("role") is None else "messages"
    if "instruction" in row and ("output" in row or "response" in row):
        return "alpaca"
    if ("prompt" in row or "question" in row) and any(column in row for column in RESPONSE_COLUMNS):
        return "prompt_response"
    return None


def _turns_of(row: Row) -> list[Any]:
    """The turns of a row of messages, as far as they are a list."""
    for column in TURN_COLUMNS:
        turns = row.get(column)
        if isinstance(turns, str):
            turns = _json_or_none(turns)
        if isinstance(turns, list) and turns:
            return turns
    return []


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class RowReader:
    """Rows of one format to conversations.

    Args:
        format_name: what `detect_format` returned.
        config: `columns`, `roles`, `reasoning` are read.
        reads: whether the chat template mentions a field.
        notes: counted remarks that refuse nothing.
    """

    def __init__(
        self, format_name: str, config: DataConfig, *, reads: Callable[[str], bool], notes: Counter[str]
    ) -> None:
        self.config, self.notes = config, notes
        readers: dict[str, Callable[[Row], Conversation | Tokens]] = {
            "messages": self._turns,
            "sharegpt": self._turns,
            "alpaca": self._alpaca,
            "prompt_response": self._prompt_response,
            "tokenised": self._tokenised,
        }
        self._read = readers[format_name]
        self._roles = {**ROLES, **config.roles}
        self._refuses_media = config.format == "auto" and format_name != "tokenised"
        self._reads_tool_calls = reads("tool_calls")
        self._reads_tools = reads("tools")
        self._reasoning_names = [name for name in REASONING_FIELDS if reads(name)]

    def read(self, row: Row) -> Conversation | Tokens | Rejection:
        """One row. Never raises for what it holds."""
        for ours, theirs in self.config.columns.items():
            if theirs not in row:
                self.notes[f"data.columns.{ours}: no column {theirs!r}"] += 1
        try:
            if self._refuses_media and (media := [n for n in MEDIA_COLUMNS & row.keys() if row[n]]):
                return Rejection(
                    "images or other media", f"column {media[0]}; name data.format to read the text"
                )
            return self._read(_mapped(row, self.config.columns))
        except RefusedRowError as refused:
            return refused.rejection
        except RecursionError:
            return Rejection("nested too deep")

    def _tokenised(self, row: Row) -> Tokens:
        if row.get("input_ids") is None or row.get("loss_mask") is None:
            raise RefusedRowError("no input_ids and loss_mask", f"columns: {', '.join(row)}")
        return Tokens(row["input_ids"], row["loss_mask"])

    def _alpaca(self, row: Row) -> Conversation:
        output = next((row[name] for name in ("output", "response") if row.get(name) is not None), None)
        if row.get("instruction") is None and not row.get("input"):
            raise RefusedRowError("no instruction", f"columns: {', '.join(row)}")
        if output is None:
            raise RefusedRowError("no output or response", f"columns: {', '.join(row)}")
        question = [_text(row.get(name), name) for name in ("instruction", "input")]
        messages = _system(row)
        for pair in _as_list(row.get("history") or [], "history"):
            if not isinstance(pair, list) or len(pair) != 2:
                raise RefusedRowError("wrong shape", "history is not a list of [question, answer]")
            messages += _exchange(_text(pair[0], "history"), _text(pair[1], "history"))
        messages += _exchange("\n\n".join(part for part in question if part), _text(output, "output"))
        self._reasoning(row, messages[-1])
        return Conversation(messages, self._tools(row))

    def _prompt_response(self, row: Row) -> Conversation:
        prompt = next((row[name] for name in ("prompt", "question") if row.get(name) is not None), None)
        response = next((row[name] for name in RESPONSE_COLUMNS if row.get(name) is not None), None)
        if prompt is None or response is None:
            raise RefusedRowError("no prompt or no response", f"columns: {', '.join(row)}")
        if isinstance(prompt, list) or isinstance(response, list):
            prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            response = (
                response if isinstance(response, list) else [{"role": "assistant", "content": response}]
            )
            return self._turns({**row, "messages": [*prompt, *response]})
        messages = _system(row) + _exchange(_text(prompt, "prompt"), _text(response, "response"))
        self._reasoning(row, messages[-1])
        return Conversation(messages, self._tools(row))

    def _turns(self, row: Row) -> Conversation:
        column = next((name for name in TURN_COLUMNS if row.get(name) is not None), None)
        if column is None:
            refused = row.get("rejection")
            if isinstance(refused, dict) and isinstance(refused.get("reason"), str):
                raise RefusedRowError(refused["reason"], str(refused.get("detail", "")))
            raise RefusedRowError("no conversation", f"columns: {', '.join(row)}")
        turns = _as_list(row[column], column)
        if not turns:
            raise RefusedRowError("empty conversation")
        messages = [self._message(turn, number) for number, turn in enumerate(turns)]
        system = _system(row)
        if messages[0]["role"] != "system":
            messages = system + messages
        elif system and system[0]["content"] != messages[0]["content"]:
            self.notes["system column left out (the conversation has a system turn)"] += 1
        first = len(messages) - len(turns)
        cut = [
            first + i
            for i, turn in enumerate(turns)
            if turn.get("open_end") is True and messages[first + i]["role"] == "assistant"
        ]
        if cut:
            self.notes["turns that were cut (their end-of-turn token is not supervised)"] += len(cut)
        return Conversation(messages, self._tools(row), frozenset(cut))

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        tools = row.get("tools")
        if isinstance(tools, str) and tools.strip():
            tools = _json_or_none(tools)
            if tools is None:
                raise RefusedRowError("wrong shape", "tools is a string that is no JSON")
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RefusedRowError("wrong shape", "tools is not a list of objects")
        tools = [{k: v for k, v in tool.items() if v is not None} for tool in tools]
        if not self._reads_tools:
            self.notes["tools column left out (the chat template renders none)"] += 1
            return None
        return tools

    def _message(self, turn: Any, number: int) -> dict[str, Any]:
        if not isinstance(turn, dict):
            raise RefusedRowError("wrong shape", f"turn {number} is {type(turn).__name__}, not an object")
        name = turn.get("role") if turn.get("role") is not None else turn.get("from")
        if not isinstance(name, str):
            raise RefusedRowError("no role", f"turn {number}: {name!r}")
        role = self._roles.get(name)
        if role is None:
            raise RefusedRowError(f"unknown role {name[:40]!r}", f"turn {number}; map it by data.roles")
        calls = _calls(turn, number)
        if calls and role != "assistant":
            raise RefusedRowError("wrong shape", f"turn {number}: tool calls of role {name!r}")
        if not calls and "content" not in turn and "value" not in turn:
            raise RefusedRowError("no content", f"turn {number} has {', '.join(map(repr, turn))}")
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        message: dict[str, Any] = {"role": role, "content": _text(content, f"turn {number}")}
        for key in ("name", "tool_call_id"):
            if turn.get(key) is not None:
                message[key] = turn[key]
        if role == "assistant":
            self._assistant(turn, name, message, calls)
        return message

    def _assistant(self, turn: dict[str, Any], name: str, message: dict[str, Any], calls: list[Any]) -> None:
        """Tool calls and reasoning of an assistant turn."""
        if turn.get("loss_weight", turn.get("weight", turn.get("train", 1))) in (0, False):
            self.notes["assistant turns marked as not to be trained on are supervised all the same"] += 1
        if not calls and name == "function_call" and self._reads_tool_calls:
            calls, message["content"] = _call_list(message["content"], "function_call"), ""
        if calls:
            if not self._reads_tool_calls:
                raise RefusedRowError("tool call", "the chat template renders no tool_calls")
            message["tool_calls"] = [_tool_call(call) for call in calls]
        self._reasoning(turn, message)

    def _reasoning(self, fields: Row, message: dict[str, Any]) -> None:
        """Reasoning that stands beside an assistant's content, in a turn or in a row of columns."""
        reasoning = next((fields[key] for key in REASONING_FIELDS if fields.get(key)), None)
        if reasoning is not None and self.config.reasoning == "keep":
            if not self._reasoning_names:
                raise RefusedRowError(
                    "reasoning", "data.reasoning is keep and the chat template renders none"
                )
            message.update(dict.fromkeys(self._reasoning_names, _text(reasoning, "reasoning")))
        elif reasoning is not None:
            self.notes["reasoning dropped (data.reasoning: drop)"] += 1


def _calls(turn: dict[str, Any], number: int) -> list[Any]:
    """Tool calls of a turn: `tool_calls`, or the older `function_call`."""
    name = next((name for name in ("tool_calls", "function_call") if turn.get(name)), None)
    return [] if name is None else _call_list(turn[name], f"turn {number}: {name}")


def _call_list(calls: Any, where: str) -> list[Any]:
    if isinstance(calls, str):
        calls = _json_or_none(calls) if calls.strip() not in ("", "null") else []
    if not isinstance(calls, dict | list):
        raise RefusedRowError("wrong shape", f"{where} is no JSON object or list of them")
    return calls if isinstance(calls, list) else [calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """One tool call as {"type", "function": {"name", "arguments"}}, arguments an object where they are."""
    if not isinstance(call, dict):
        raise RefusedRowError("wrong shape", "a tool call is not an object")
    function: dict[str, Any] = call["function"] if isinstance(call.get("function"), dict) else call
    if not isinstance(function.get("name"), str):
        raise RefusedRowError("wrong shape", "a tool call has no name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        parsed = _json_or_none(arguments)
        arguments = parsed if isinstance(parsed, dict) else arguments
    out: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    if call.get("id") is not None:
        out["id"] = call["id"]
    return out


def _text(content: Any, where: str) -> str:
    """Text of a content: a string, null, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    raise RefusedRowError("content is no text", f"{where}: {type(content).__name__}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RefusedRowError("content part is no text", f"{where}: {kind!r}")


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        value = _json_or_none(value)
    if not isinstance(value, list):
        raise RefusedRowError("wrong shape", f"{name} is not a list")
    return value


def _system(row: Row) -> list[dict[str, Any]]:
    """The row's `system` column as a first message."""
    text = row.get("system") if row.get("system") is not None else row.get("system_prompt")
    return [{"role": "system", "content": _text(text, "system")}] if text else []


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
