"""Formats of files by their columns, and files of other data, which are rejected as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.data.format_detection import detect_format
from dflash_core.errors import UserError

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": PAIR[:1]}, "prompts only"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "prompts only"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"messages": PAIR, "chosen": PAIR, "rejected": PAIR}, "preference pairs"),
        ({"prompt": {}, "replies": []}, "message trees"),
        ({"message_tree_id": 1, "parent_id": 2, "text": "t", "role": "r"}, "message trees"),
        ({"text": "once upon a time"}, "no known format; columns seen: text"),
        ({"prompt": "q"}, "prompts only; .* regenerate.enabled: true"),
        ({"instruction": "q", "input": ""}, "prompts only"),
        ({"turns": ["q"]}, "no known format; columns seen: turns"),
    ],
)
def test_other_data_is_rejected_as_a_file(row: dict[str, Any], kind: str) -> None:
    with pytest.raises(UserError, match=kind) as failure:
        detect_format([row] * 3, DataConfig(), source="x.jsonl")
    assert "accepted: messages" in str(failure.value)
    assert str(next(iter(row))) in str(failure.value)


def test_prompts_are_accepted_where_the_target_writes_the_answers() -> None:
    row = {"messages": PAIR[:1]}
    assert detect_format([row], DataConfig(), source="x", answered=False) == "messages"
    assert detect_format([{"prompt": "q"}], DataConfig(), source="x", answered=False) == "prompt_response"
    assert detect_format([{"instruction": "q"}], DataConfig(), source="x", answered=False) == "alpaca"
    unknown = {"messages": [PAIR[0], {"role": "laguna_s", "content": "a"}]}
    assert detect_format([unknown], DataConfig(), source="x") == "messages"  # its rows report the reason
    assert detect_format([row, {"messages": PAIR}], DataConfig(), source="x") == "messages"


def test_empty_columns_do_not_change_the_kind_of_data() -> None:
    row = {"messages": PAIR, "chosen": None, "rejected": None, "image": ""}
    assert detect_format([row], DataConfig(), source="x") == "messages"


def test_a_named_format_is_not_checked() -> None:
    row = {"messages": PAIR, "chosen": PAIR, "rejected": PAIR}
    assert detect_format([row], DataConfig(format="messages"), source="x") == "messages"


def test_the_format_of_most_rows_wins() -> None:
    rows: list[dict[str, Any]] = [{"messages": []}, {"other": 1}, {"messages": PAIR}, {"messages": PAIR}]
    assert detect_format(rows, DataConfig(), source="x") == "messages"


def test_a_mapping_of_lists_is_a_conversation() -> None:
    for row, name in (
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, "messages"),
        ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, "sharegpt"),
    ):
        assert detect_format([row], DataConfig(), source="x") == name


@pytest.mark.parametrize(
    "other", [{"chosen": PAIR, "rejected": PAIR}, {"mapping": {}}, {"images": ["x.png"]}]
)
def test_a_few_rows_of_other_data_do_not_refuse_the_file(other: dict[str, Any]) -> None:
    rows = [{"messages": PAIR, **other}, *[{"messages": PAIR}] * 3]
    assert detect_format(rows, DataConfig(), source="x") == "messages"
