"""Rows to conversations: every accepted shape, and every rejected one with its reason."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.data.chat import Conversation, Rejection
from dflash_core.data.format_detection import detect_format
from dflash_core.data.formats import RowReader, Tokens
from dflash_core.errors import UserError

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def read(row: dict[str, Any], fields: str = "", **settings: Any) -> Conversation | Tokens | Rejection:
    """Detect the format of one row and read it; `fields` are those that the chat template mentions."""
    config = DataConfig(**settings)
    name = detect_format([row], config, source="x")
    return RowReader(name, config, reads=lambda field: field in fields.split(), notes=Counter()).read(row)


def turns(row: dict[str, Any], fields: str = "", **settings: Any) -> list[tuple[str, str]]:
    conversation = read(row, fields, **settings)
    assert isinstance(conversation, Conversation), conversation
    return [(message["role"], message["content"]) for message in conversation.messages]


def reason(row: dict[str, Any], fields: str = "", **settings: Any) -> str:
    rejection = read(row, fields, **settings)
    assert isinstance(rejection, Rejection), rejection
    return rejection.reason


def test_messages_as_list_string_and_parts() -> None:
    expected = [("user", "q"), ("assistant", "a")]
    assert turns({"messages": PAIR, "label": True}) == expected
    assert turns({"messages": json.dumps(PAIR)}) == expected
    assert turns({"conversation": PAIR}) == expected
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "value": "!"}]},
        PAIR[1],
    ]
    assert turns({"messages": parts}) == [("user", "q!"), ("assistant", "a")]


def test_sharegpt_roles_come_from_the_field_and_all_turns_stay() -> None:
    row = {
        "system": "s",
        "conversations": [
            {"from": "human", "value": "1"},
            {"from": "gpt", "value": "2"},
            {"from": "human", "value": "3"},
            {"from": "gpt", "value": "4"},
        ],
    }
    expected = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    assert turns(row) == [("system", "s"), *expected]


def test_conversations_of_role_and_content_are_messages() -> None:
    assert turns({"conversations": PAIR}) == [("user", "q"), ("assistant", "a")]


def test_sharegpt_function_call_is_text_or_a_tool_call() -> None:
    call = '{"name": "f", "arguments": {"x": 1}}'
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": '[{"name": "f"}]',
    }
    assert turns(row) == [("user", "q"), ("assistant", call), ("tool", "7"), ("assistant", "a")]
    conversation = read(row, "tool_calls tools")
    assert isinstance(conversation, Conversation)
    assert conversation.tools == [{"name": "f"}]
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_tool_calls_with_arguments_as_object_or_string(arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "7"},
            {"role": "assistant", "content": "a"},
        ]
    }
    assert reason(row) == "tool call"
    conversation = read(row, "tool_calls")
    assert isinstance(conversation, Conversation)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[2]["content"] == ""
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert conversation.messages[3] == {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c1"}


def test_alpaca_columns() -> None:
    expected = [("user", "i"), ("assistant", "o")]
    assert turns({"instruction": "i", "input": "", "output": "o"}) == expected
    with_input = {"instruction": "i", "input": "x", "response": "o"}
    assert turns(with_input) == [("user", "i\n\nx"), ("assistant", "o")]
    row = {"instruction": "i", "output": "o", "system": "s", "history": [["q", "a"]]}
    assert turns(row) == [("system", "s"), ("user", "q"), ("assistant", "a"), *expected]
    mapped = {"task": "i", "code": "o", "id": 3}
    assert turns(mapped, columns={"instruction": "task", "output": "code"}) == expected


@pytest.mark.parametrize("column", ["response", "completion", "answer"])
def test_prompt_and_response_columns(column: str) -> None:
    assert turns({"prompt": "q", column: "a"}) == [("user", "q"), ("assistant", "a")]
    assert turns({"question": "q", column: "a"}) == [("user", "q"), ("assistant", "a")]
    assert turns({"prompt": PAIR[:1], column: PAIR[1:]}) == [("user", "q"), ("assistant", "a")]


def test_tokenised_columns() -> None:
    assert read({"input_ids": [1, 2], "loss_mask": [0, 1]}) == Tokens([1, 2], [0, 1])
    assert read({"ids": [1], "m": [1]}, columns={"input_ids": "ids", "loss_mask": "m"}) == Tokens([1], [1])


def test_unknown_roles_are_rejected_or_mapped_and_never_skipped() -> None:
    row = {"messages": [PAIR[0], {"role": "laguna_s", "content": "a"}]}
    assert reason(row) == "unknown role 'laguna_s'"
    assert turns(row, roles={"laguna_s": "assistant"}) == [("user", "q"), ("assistant", "a")]


def test_null_content_is_empty_text() -> None:
    row = {"messages": [PAIR[0], {"role": "assistant", "content": None}]}
    assert turns(row) == [("user", "q"), ("assistant", "")]


def test_reasoning_is_dropped_or_kept_by_name() -> None:
    row = {"messages": [PAIR[0], {**PAIR[1], "reasoning": "hm"}]}
    dropped = read(row, "reasoning_content")
    assert isinstance(dropped, Conversation)
    assert dropped.messages[1] == PAIR[1]
    kept = read(row, "reasoning_content", reasoning="keep")
    assert isinstance(kept, Conversation)
    assert kept.messages[1] == {**PAIR[1], "reasoning_content": "hm"}
    assert reason(row, reasoning="keep") == "reasoning"


@pytest.mark.parametrize("row", [{"prompt": "q", "response": "a"}, {"instruction": "q", "output": "a"}])
def test_reasoning_in_a_column_follows_the_same_rule(row: dict[str, Any]) -> None:
    row = {**row, "thinking": "hm"}
    kept = read(row, "reasoning_content", reasoning="keep")
    assert isinstance(kept, Conversation)
    assert kept.messages == [PAIR[0], {**PAIR[1], "reasoning_content": "hm"}]
    assert turns(row) == [("user", "q"), ("assistant", "a")]
    assert reason(row, reasoning="keep") == "reasoning"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [PAIR[0], "a"]}, "wrong shape"),
        ({"messages": [PAIR[0], {"content": "a"}]}, "no role"),
        ({"messages": [PAIR[0], {"role": "assistant", "content": {"x": 1}}]}, "content is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, PAIR[1]]},
            "content part is not text",
        ),
        ({"instruction": None, "output": "o"}, "no instruction"),
        ({"instruction": "i", "output": None}, "no output or response"),
        ({"prompt": "q", "response": None}, "no prompt or no response"),
        ({"messages": PAIR, "tools": "{"}, "wrong shape"),
        ({"messages": [PAIR[0], {"role": "assistant", "text": "a"}]}, "no content"),
        ({"messages": [{"role": "user", "text": "q"}, PAIR[1]]}, "no content"),
        ({"messages": [PAIR[0], {**PAIR[1], "tool_calls": "f(x)"}]}, "wrong shape"),
        ({"messages": [PAIR[0], {**PAIR[1], "tool_calls": 7}]}, "wrong shape"),
        ({"messages": [PAIR[0], {**PAIR[1], "function_call": '{"name": "f"}'}]}, "tool call"),
        ({"messages": [{**PAIR[0], "tool_calls": [{"name": "f"}]}, PAIR[1]]}, "wrong shape"),
    ],
)
def test_rows_of_wrong_shape_are_rejected_with_their_reason(row: dict[str, Any], expected: str) -> None:
    assert reason(row) == expected


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_calls_without_content_and_calls_as_text(name: str) -> None:
    call = {"name": "f", "arguments": '{"x": 1}'}
    for calls in (call, [call], json.dumps(call)):
        conversation = read({"messages": [PAIR[0], {"role": "assistant", name: calls}]}, "tool_calls")
        assert isinstance(conversation, Conversation)
        expected = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
        assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": expected}
    for none in (None, [], "", "null"):
        row = {"messages": [PAIR[0], {**PAIR[1], name: none}]}
        assert turns(row) == [("user", "q"), ("assistant", "a")]


def test_nulls_of_a_tool_are_dropped() -> None:
    conversation = read({"messages": PAIR, "tools": [{"name": "f", "description": None}]}, "tools")
    assert isinstance(conversation, Conversation)
    assert conversation.tools == [{"name": "f"}]


def test_media_reject_only_their_row_and_empty_media_columns_nothing() -> None:
    config = DataConfig()
    name = detect_format([{"messages": PAIR, "images": []}], config, source="x")
    reader = RowReader(name, config, reads=lambda _: False, notes=Counter())
    assert isinstance(reader.read({"messages": PAIR, "images": None}), Conversation)
    rejected = reader.read({"messages": PAIR, "images": ["a.png"]})
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "images or other media"
    assert reason({"messages": PAIR, "images": ["a.png"]}, format="messages") == "images or other media"
    assert reason({"messages": PAIR, "image": {"bytes": b"x", "path": None}}) == "images or other media"
    assert turns({"messages": PAIR, "image": {"bytes": None, "path": ""}})[1] == ("assistant", "a")


def test_a_system_column_next_to_a_system_turn_and_tools_of_any_format() -> None:
    notes: Counter[str] = Counter()
    reader = RowReader("messages", DataConfig(), reads=lambda _: True, notes=notes)
    system = {"role": "system", "content": "s"}
    for column in ("s", None, "other"):
        read_row = reader.read({"messages": [system, *PAIR], "system": column})
        assert isinstance(read_row, Conversation)
        assert read_row.messages == [system, *PAIR]
    assert notes == {"system column left out (the conversation has a system turn)": 1}
    for row in ({"prompt": "q", "response": "a"}, {"instruction": "q", "output": "a"}):
        conversation = read({**row, "tools": [{"name": "f"}]}, "tools")
        assert conversation == Conversation(PAIR, [{"name": "f"}])


def test_a_mapped_column_that_is_missing_is_counted() -> None:
    config = DataConfig(columns={"system": "sytem"})
    notes: Counter[str] = Counter()
    reader = RowReader("messages", config, reads=lambda _: False, notes=notes)
    reader.read({"messages": PAIR, "system_text": "s"})
    assert notes == {"data.columns.system: no column 'sytem'": 1}
    with pytest.raises(UserError, match="data.columns: 'instructions' .* allowed: .*instruction"):
        DataConfig(columns={"instructions": "task"})


@pytest.mark.parametrize("name", ["loss", "loss_weight", "weight", "train", "training", "train_on_turn"])
def test_a_turn_marked_as_not_to_be_trained_on_is_not_supervised(name: str) -> None:
    for off, on in ((False, True), (0, 1), (0.0, 1.0), (False, None)):
        row = {"messages": [PAIR[0], {**PAIR[1], name: off}, PAIR[0], {**PAIR[1], name: on}]}
        conversation = read(row)
        assert isinstance(conversation, Conversation)
        assert conversation.messages == PAIR * 2
        assert conversation.unsupervised == {1}
    for wrong in ("no", [], -1, float("nan"), float("inf")):
        assert reason({"messages": [PAIR[0], {**PAIR[1], name: wrong}]}) == "wrong shape"


def test_marks_that_a_loss_mask_cannot_honour_are_counted() -> None:
    notes: Counter[str] = Counter()
    reader = RowReader("messages", DataConfig(), reads=lambda _: False, notes=notes)
    turns_ = [{**PAIR[0], "train": True}, {**PAIR[1], "weight": 0.5}, PAIR[0], {**PAIR[1], "loss": False}]
    conversation = reader.read({"messages": turns_})
    assert isinstance(conversation, Conversation)
    assert conversation.unsupervised == {3}
    assert notes == {
        "turns of other roles marked to be trained on are not supervised": 1,
        "turns with a weight other than 0 and 1 (read as 1)": 1,
        "assistant turns marked as not to be trained on are not supervised": 1,
    }


@pytest.mark.parametrize("blank", ["", " \n\t ", None, "\u00a0"])
def test_blank_answers_are_not_supervised(blank: str | None) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [*PAIR, PAIR[0], {"role": "assistant", "content": blank}]},
        {"prompt": PAIR[:1], "response": [PAIR[1], PAIR[0], {"role": "assistant", "content": blank}]},
        {"instruction": "q", "output": "a", "history": [["q", blank]]},
    ]
    for row, blank_turn in zip(rows, (3, 3, 1)):
        conversation = read(row)
        assert isinstance(conversation, Conversation)
        assert conversation.unsupervised == {blank_turn}
    call = {"role": "assistant", "content": blank, "tool_calls": [{"name": "f"}]}
    conversation = read({"messages": [PAIR[0], call]}, "tool_calls")
    assert isinstance(conversation, Conversation)
    assert conversation.unsupervised == set()
    thinking = {"role": "assistant", "content": blank, "reasoning": "hm"}
    for kept, expected in (("keep", set()), ("drop", {1})):
        conversation = read({"messages": [PAIR[0], thinking]}, "reasoning_content", reasoning=kept)
        assert isinstance(conversation, Conversation)
        assert conversation.unsupervised == expected


def test_a_mapping_of_lists_is_zipped_into_turns() -> None:
    expected = [("user", "q"), ("assistant", "a")]
    zipped = {"role": ["user", "assistant"], "content": ["q", "a"]}
    assert turns({"messages": zipped}) == expected
    assert turns({"messages": json.dumps(zipped)}) == expected
    assert turns({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}) == expected
    assert turns({"messages": {**zipped, "name": [None, None], "tool_calls": None}}) == expected
    assert turns({"prompt": {"role": ["user"], "content": ["q"]}, "completion": "a"}) == expected
    marked = read({"messages": {**zipped, "loss": [None, False]}})
    assert isinstance(marked, Conversation)
    assert marked.unsupervised == {1}


@pytest.mark.parametrize(
    "columns",
    [
        {"role": ["user", "assistant"], "content": ["q"]},
        {"role": ["user", "assistant"], "content": "qa"},
        {"role": "user", "content": ["q"]},
    ],
)
def test_a_mapping_of_lists_of_different_lengths_is_rejected(columns: dict[str, Any]) -> None:
    reader = RowReader("messages", DataConfig(), reads=lambda _: False, notes=Counter())
    rejection = reader.read({"messages": columns})
    assert isinstance(rejection, Rejection)
    assert rejection.reason == "wrong shape"


def test_media_in_a_turn_reject_the_row_and_empty_media_nothing() -> None:
    turn = {"role": "user", "content": "q", "images": ["x.png"]}
    assert reason({"messages": [turn, PAIR[1]]}) == "images or other media"
    empty = {"role": "user", "content": "q", "images": [], "audio": None}
    assert turns({"messages": [empty, PAIR[1]]}) == [("user", "q"), ("assistant", "a")]


def test_an_empty_column_of_turns_does_not_hide_a_full_one() -> None:
    row = {"messages": [], "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert turns(row) == [("user", "q"), ("assistant", "a")]
