"""Templates of current model families: ids of `apply_chat_template`, masks of what a target has to write."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Sample
from tests.support.template_corpus import DIRECTORY, FAMILIES, KINDS, Family

ENCODERS: dict[str, ChatEncoder] = {}
CASES = [(family, kind) for family in FAMILIES for kind in KINDS if family.row(kind)]
EACH_CASE = pytest.mark.parametrize("family, kind", CASES, ids=[f"{f.name}-{k}" for f, k in CASES])


class FixedDay(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> FixedDay:
        return cls(2025, 1, 1)


def encoder_of(family: Family) -> ChatEncoder:
    if family.name not in ENCODERS:
        config = DataConfig(template_arguments=family.arguments)
        ENCODERS[family.name] = ChatEncoder(family.tokenizer, config, None)
    return ENCODERS[family.name]


def sample_of(family: Family, messages: list[dict[str, Any]], tools: Any) -> Sample:
    encoder = encoder_of(family)
    rendered = encoder.render(Conversation(messages, tools))
    assert not isinstance(rendered, Rejection), rendered
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    return sample


def supervised_texts(family: Family, sample: Sample) -> list[str]:
    runs: list[list[int]] = []
    previous = 0
    for token, flag in zip(sample.token_ids.tolist(), sample.loss_mask.tolist()):
        if flag:
            runs += [[]] if not previous else []
            runs[-1].append(token)
        previous = flag
    return [family.tokenizer.decode(run) for run in runs]


def test_every_template_of_the_corpus_is_tried() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.jinja")} == {family.name for family in FAMILIES}
    assert len(FAMILIES) >= 40


@EACH_CASE
def test_ids_are_those_of_apply_chat_template(
    family: Family, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, tools = family.row(kind) or ([], None)
    sample = sample_of(family, messages, tools)
    monkeypatch.setattr(chat_template_utils, "datetime", FixedDay)
    if family.parts:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    expected = family.tokenizer.apply_chat_template(messages, tools=tools, **family.arguments)
    assert sample.token_ids.tolist() == expected["input_ids"]


@EACH_CASE
def test_supervised_is_what_the_target_has_to_write(family: Family, kind: str) -> None:
    messages, tools = family.row(kind) or ([], None)
    assert supervised_texts(family, sample_of(family, messages, tools)) == family.written(kind)


@EACH_CASE
def test_control_strings_in_the_data_change_neither_template_nor_turns(family: Family, kind: str) -> None:
    """The question then holds a control string, which takes the path that encodes text piece by piece."""
    messages, tools = family.row(kind) or ([], None)
    clean = sample_of(family, messages, tools)
    forged = [{**m, "content": m["content"] + "</s>"} if m["role"] == "user" else m for m in messages]
    dirty = sample_of(family, forged, tools)
    assert supervised_texts(family, dirty) == supervised_texts(family, clean)
    assert [i for i in dirty.token_ids.tolist() if i >= 400] == [i for i in clean.token_ids if i >= 400]


@EACH_CASE
def test_the_skeleton_agrees_with_rendering_each_turn(family: Family, kind: str) -> None:
    messages, tools = family.row(kind) or ([], None)
    template = encoder_of(family).template
    assert template.render(messages, tools) == template._render_slowly(messages, tools)
