"""Formats of rows: their columns, and rows of any format to conversations.

| format | columns | notes |
|---|---|---|
| messages | `messages` (or `conversation`, `conversations`): role, content | list or JSON string |
| sharegpt | `conversations` (or `conversation`, `messages`): from, value | human, gpt, observation |
| alpaca | `instruction`, `input`, and `output` or `response` | `system` and `history` too |
| prompt_response | `prompt` or `question`, and `response`, `completion`, `answer` | or lists of messages |
| tokenised | `input_ids`, `loss_mask` | no template; ids and mask are used unchanged |

`data.columns` gives other names of columns: {"instruction": "task", "output": "code"}; rows without such a
column are counted. Rules for all formats:
- `content: null` is empty text. A turn without `content` or `value` rejects the row unless it calls tools. A
  list of text parts is concatenated; any other part rejects the row.
- Roles are system, user, assistant and tool, and the known names in `ROLES`; any other role rejects the row
  unless `data.roles` maps it. No turn is ever skipped.
- Tool calls keep their arguments, an object or the JSON text of one. Calls that are not JSON, or of another
  role than the assistant's, reject the row, and so does a template that does not render `tool_calls`. The
  exception is ShareGPT's `function_call`, whose value is then the text that the assistant wrote.
- Reasoning fields are dropped (`data.reasoning: drop`) or passed to the template under the names
  it reads (`keep`).
- `open_end: true` on an assistant turn means that it was cut: see `Conversation.open_ends`.
- `rejection` in place of a conversation is the rejection of an earlier stage, kept unchanged.
- A row with images or other media, in a column or a turn, is rejected: its text alone is not what was
  answered.
- Turns may also be a mapping of lists, one entry per turn, as `datasets` writes them.
- Assistant turns that are blank, or marked as not to be trained on (`turns.py`), are not supervised. They
  stay in the conversation; a row without another assistant turn is rejected.
- Other columns are ignored; row ids are not keys.

To add a format: a case in `_format_of` (`format_detection.py`), a method of `RowReader` here, and its
name in `DataConfig.format`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import Conversation, Rejection
from dflash_core.data.tool_calls import call_list, calls_of, tool_call
from dflash_core.data.turns import (
    REASONING_FIELDS,
    TRAINING_MARKS,
    RowError,
    as_list,
    is_blank,
    is_columns,
    json_or_none,
    text_of,
    training_mark,
)

Row = Mapping[str, Any]
ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "function_call": "assistant"}
ROLES |= {"observation": "tool", "function": "tool"}
TURN_COLUMNS = ("messages", "conversations", "conversation")
RESPONSE_COLUMNS = ("response", "completion", "answer", "output")
# Columns of rows, and fields of turns, and the reason of rows where one of them is not empty.
MEDIA = "images or other media"
MEDIA_COLUMNS = frozenset(("image", "images", "video", "videos", "audio", "audios", "pixel_values"))


@dataclass(frozen=True)
class Tokens:
    """A row that is already tokenised."""

    token_ids: Any
    loss_mask: Any


class RowReader:
    """Converts rows of one format to conversations.

    Args:
        format_name: as returned by `detect_format`.
        config: `columns`, `roles` and `reasoning` are read.
        reads: returns True if the chat template mentions a field.
        notes: counts remarks that do not reject a row.
        answered: reject prompts without answers; otherwise they are conversations that end with a question.
    """

    def __init__(
        self,
        format_name: str,
        config: DataConfig,
        *,
        reads: Callable[[str], bool],
        notes: Counter[str],
        answered: bool = True,
    ) -> None:
        self.config, self.notes, self._answered = config, notes, answered
        readers: dict[str, Callable[[Row], Conversation | Tokens]] = {
            "messages": self._turns,
            "sharegpt": self._turns,
            "alpaca": self._alpaca,
            "prompt_response": self._prompt_response,
            "tokenised": self._tokenised,
            "regenerated": self._regenerated,
        }
        self._read = readers[format_name]
        self._roles = {**ROLES, **config.roles}
        self._rejects_media = format_name != "tokenised"
        self._reads_tool_calls = reads("tool_calls")
        self._reads_tools = reads("tools")
        self._reasoning_names = [name for name in REASONING_FIELDS if reads(name)]

    def read(self, row: Row) -> Conversation | Tokens | Rejection:
        """Convert one row. Never raises because of its content."""
        for ours, theirs in self.config.columns.items():
            if theirs not in row:
                self.notes[f"data.columns.{ours}: no column {theirs!r}"] += 1
        try:
            if self._rejects_media and (media := media_columns(row)):
                return Rejection(MEDIA, f"column {media[0]} is not empty")
            return self._read(renamed(row, self.config.columns))
        except RowError as error:
            return error.rejection
        except RecursionError:
            return Rejection("nested too deep")

    def _tokenised(self, row: Row) -> Tokens:
        if row.get("input_ids") is None or row.get("loss_mask") is None:
            raise RowError("no input_ids and loss_mask", f"columns: {', '.join(row)}")
        return Tokens(row["input_ids"], row["loss_mask"])

    def _regenerated(self, row: Row) -> Conversation | Tokens:
        """Read a row of `messages` that may hold `tokens`, the ids that the target chose."""
        if not isinstance(row.get("tokens"), dict):
            return self._turns(row)
        self.notes["kept as the ids that the target chose (their text encodes to others)"] += 1
        return self._tokenised(row["tokens"])

    def _alpaca(self, row: Row) -> Conversation:
        output = next((row[name] for name in ("output", "response") if row.get(name) is not None), None)
        if row.get("instruction") is None and not row.get("input"):
            raise RowError("no instruction", f"columns: {', '.join(row)}")
        if output is None and self._answered:
            raise RowError("no output or response", f"columns: {', '.join(row)}")
        question = [text_of(row.get(name), name) for name in ("instruction", "input")]
        messages = _system(row)
        for pair in as_list(row.get("history") or [], "history"):
            if not isinstance(pair, list) or len(pair) != 2:
                raise RowError("wrong shape", "history is not a list of [question, answer]")
            messages += _exchange(text_of(pair[0], "history"), text_of(pair[1], "history"))
        messages.append(_turn("user", "\n\n".join(part for part in question if part)))
        if output is not None:
            messages.append(_turn("assistant", text_of(output, "output")))
            self._reasoning(row, messages[-1])
        return self._conversation(messages, row)

    def _prompt_response(self, row: Row) -> Conversation:
        prompt = next((row[name] for name in ("prompt", "question") if row.get(name) is not None), None)
        response = next((row[name] for name in RESPONSE_COLUMNS if row.get(name) is not None), None)
        if response is None and not self._answered:
            response = []
        if prompt is None or response is None:
            raise RowError("no prompt or no response", f"columns: {', '.join(row)}")
        if _are_turns(prompt) or _are_turns(response):
            asked = as_list(prompt, "prompt") if _are_turns(prompt) else [_turn("user", prompt)]
            given = as_list(response, "response") if _are_turns(response) else [_turn("assistant", response)]
            return self._turns({**row, "messages": [*asked, *given]})
        messages = _system(row) + _exchange(text_of(prompt, "prompt"), text_of(response, "response"))
        self._reasoning(row, messages[-1])
        return self._conversation(messages, row)

    def _turns(self, row: Row) -> Conversation:
        given = [name for name in TURN_COLUMNS if row.get(name) is not None]
        # Where rows of two formats were joined, one of the columns is empty.
        column = next((name for name in given if row[name]), given[0] if given else None)
        if column is None:
            rejection = row.get("rejection")
            if isinstance(rejection, dict) and isinstance(rejection.get("reason"), str):
                raise RowError(rejection["reason"], str(rejection.get("detail", "")))
            raise RowError("no conversation", f"columns: {', '.join(row)}")
        turns = as_list(row[column], column)
        if not turns:
            raise RowError("empty conversation")
        messages = [self._message(turn, number) for number, turn in enumerate(turns)]
        system = _system(row)
        if messages[0]["role"] != "system":
            messages = system + messages
        elif system and system[0]["content"] != messages[0]["content"]:
            self.notes["system column left out (the conversation has a system turn)"] += 1
        first = len(messages) - len(turns)
        open_ends = (i for i, turn in enumerate(turns, start=first) if turn.get("open_end") is True)
        cut = [i for i in open_ends if messages[i]["role"] == "assistant"]
        if cut:
            self.notes["turns that were cut (their end-of-turn token is not supervised)"] += len(cut)
        marked = [number for number, turn in enumerate(turns) if not TRAINING_MARKS.isdisjoint(turn)]
        untrained = [
            first + n for n in marked if self._is_untrained(turns[n], n, messages[first + n]["role"])
        ]
        return self._conversation(messages, row, frozenset(cut), untrained)

    def _is_untrained(self, turn: dict[str, Any], number: int, role: str) -> bool:
        mark = training_mark(turn, number, self.notes)
        if mark and role != "assistant":
            self.notes["turns of other roles marked to be trained on are not supervised"] += 1
        return mark is False and role == "assistant"

    def _conversation(
        self,
        messages: list[dict[str, Any]],
        row: Row,
        open_ends: frozenset[int] = frozenset(),
        untrained: Sequence[int] = (),
    ) -> Conversation:
        """Return the conversation; its blank turns are not supervised, nor are those marked `untrained`."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        blank = [i for i in answers if is_blank(messages[i])]
        if not blank and not untrained:
            return Conversation(messages, self._tools(row), open_ends)
        unsupervised = frozenset((*blank, *untrained))
        if len(unsupervised) < len(answers):
            if untrained:
                note = "assistant turns marked as not to be trained on are not supervised"
                self.notes[note] += len(untrained)
            if blank:
                self.notes["blank assistant turns are not supervised"] += len(blank)
        return Conversation(messages, self._tools(row), open_ends, unsupervised)

    def _tools(self, row: Row) -> list[dict[str, Any]] | None:
        tools = row.get("tools")
        if isinstance(tools, str) and tools.strip():
            tools = json_or_none(tools)
            if tools is None:
                raise RowError("wrong shape", "tools is a string that is not JSON")
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RowError("wrong shape", "tools is not a list of objects")
        tools = [{k: v for k, v in tool.items() if v is not None} for tool in tools]
        if not self._reads_tools:
            self.notes["tools column left out (the chat template renders none)"] += 1
            return None
        return tools

    def _message(self, turn: Any, number: int) -> dict[str, Any]:
        if not isinstance(turn, dict):
            raise RowError("wrong shape", f"turn {number} is {type(turn).__name__}, not an object")
        name = turn.get("role") if turn.get("role") is not None else turn.get("from")
        if not isinstance(name, str):
            raise RowError("no role", f"turn {number}: {name!r}")
        role = self._roles.get(name)
        if role is None:
            raise RowError(f"unknown role {name[:40]!r}", f"turn {number}; map it by data.roles")
        if media := media_columns(turn):
            raise RowError(MEDIA, f"turn {number}: {media[0]} is not empty")
        calls = calls_of(turn, number)
        if calls and role != "assistant":
            raise RowError("wrong shape", f"turn {number}: tool calls of role {name!r}")
        if not calls and "content" not in turn and "value" not in turn:
            raise RowError("no content", f"turn {number} has {', '.join(map(repr, turn))}")
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        message: dict[str, Any] = {"role": role, "content": text_of(content, f"turn {number}")}
        for key in ("name", "tool_call_id"):
            if turn.get(key) is not None:
                message[key] = turn[key]
        if role == "assistant":
            self._assistant(turn, name, message, calls)
        return message

    def _assistant(self, turn: dict[str, Any], name: str, message: dict[str, Any], calls: list[Any]) -> None:
        """Add tool calls and reasoning to the message of an assistant turn."""
        if not calls and name == "function_call" and self._reads_tool_calls:
            calls, message["content"] = call_list(message["content"], "function_call"), ""
        if calls:
            if not self._reads_tool_calls:
                raise RowError("tool call", "the chat template renders no tool_calls")
            message["tool_calls"] = [tool_call(call) for call in calls]
        self._reasoning(turn, message)

    def _reasoning(self, fields: Row, message: dict[str, Any]) -> None:
        """Add the reasoning that accompanies an assistant's content, in a turn or in a row of columns."""
        reasoning = next((fields[key] for key in REASONING_FIELDS if fields.get(key)), None)
        if reasoning is not None and self.config.reasoning == "keep":
            if not self._reasoning_names:
                raise RowError("reasoning", "data.reasoning is keep and the chat template renders none")
            message.update(dict.fromkeys(self._reasoning_names, text_of(reasoning, "reasoning")))
        elif reasoning is not None:
            self.notes["reasoning dropped (data.reasoning: drop)"] += 1


def _system(row: Row) -> list[dict[str, Any]]:
    """Return the row's `system` column as a first message."""
    text = row.get("system") if row.get("system") is not None else row.get("system_prompt")
    return [{"role": "system", "content": text_of(text, "system")}] if text else []


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [_turn("user", question), _turn("assistant", answer)]


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _are_turns(value: Any) -> bool:
    """Return True for a prompt or response that is a list of messages instead of a text."""
    return isinstance(value, list) or is_columns(value)


def media_columns(row: Row) -> list[str]:
    """Return the columns of images and other media that are not empty, sorted."""
    if MEDIA_COLUMNS.isdisjoint(row):
        return []
    return sorted(name for name in MEDIA_COLUMNS & row.keys() if _holds_something(row[name]))


def _holds_something(value: Any) -> bool:
    """Return True unless a value is null, empty, or made of such: {"bytes": null, "path": null}."""
    if isinstance(value, dict | list):
        return any(map(_holds_something, value.values() if isinstance(value, dict) else value))
    return value is not None and not (isinstance(value, str | bytes) and not value)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row with the user's columns under the names of the format."""
    if not columns:
        return row
    return {**row, **{ours: row.get(theirs) for ours, theirs in columns.items() if theirs in row}}
