"""Chat templates: prompts and turns that differ, named templates, arguments, dates, long conversations."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Sample
from dflash_core.data.ingest import ingest_file, ingest_key_fields
from dflash_core.data.reasoning_blocks import skip_empty_block
from dflash_core.data.skeleton import LONG
from dflash_core.data.template import MAX_SLOW_MESSAGES
from dflash_core.errors import UserError
from tests.support.chat_families import CHATML, TEMPLATES, small_tokenizer
from tests.support.template_corpus import CALL, FAMILIES, TOOLS, Family

BY_NAME = {family.name: family for family in FAMILIES}
SHARED = "supervised behind the header that the turn and its generation prompt share"


def encoder_of(template: Any, **settings: Any) -> ChatEncoder:
    tokenizer = copy.copy(template.tokenizer if isinstance(template, Family) else small_tokenizer())
    if not isinstance(template, Family):
        tokenizer.chat_template = template
    return ChatEncoder(tokenizer, DataConfig(**settings), None)


def turns_of(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def sample_of(encoder: ChatEncoder, messages: list[dict[str, Any]], tools: Any = None) -> Sample:
    rendered = encoder.render(Conversation(messages, tools))
    assert not isinstance(rendered, Rejection), rendered
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    return sample


def supervised(encoder: ChatEncoder, sample: Sample) -> str:
    """Return the supervised tokens as one text."""
    return encoder.tokenizer.decode(sample.token_ids[sample.loss_mask.astype(bool)])


@pytest.mark.parametrize(
    "text, rest",
    [
        ("<think>\n\n</think>\n\nHi", "Hi"),
        ("\n</think>\n\nHi", "Hi"),
        ("</think>Hi", "Hi"),
        ("[THINK][/THINK]Hi", "Hi"),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>Hi", "<|START_RESPONSE|>Hi"),
        ("<seed:think></seed:think>Hi", "Hi"),
        ("\u25c1think\u25b7\u25c1/think\u25b7Hi", "Hi"),
        ("<|channel>thought\n<channel|>Hi", "Hi"),
        ("<think:on>\n</think:on>Hi", "Hi"),
        ("</think><think>\n</think>\nHi", "Hi"),
        ("<think>so</think>Hi", "<think>so</think>Hi"),
        ("<tool_call></tool_call>Hi", "<tool_call></tool_call>Hi"),
        ("<think>Hi", "<think>Hi"),
        ("  Hi", "  Hi"),
    ],
)
def test_empty_reasoning_blocks(text: str, rest: str) -> None:
    assert text[skip_empty_block(text, 0) :] == rest
    assert skip_empty_block("ab" + text, 2) == 2 + len(text) - len(rest)


@pytest.mark.parametrize("name", ["qwq", "deepseek-r1", "minimax-m2", "nemotron-nano2"])
def test_a_prompt_that_opens_reasoning_leaves_one_note_per_row(name: str) -> None:
    encoder = encoder_of(BY_NAME[name])
    sample = sample_of(encoder, turns_of("q1", "a1", "q2", "a2"))
    assert sample.notes == (SHARED,)
    assert "think" not in supervised(encoder, sample)


@pytest.mark.parametrize("content", ["<think>\nso\n</think>\n\na", "so\n</think>\n\na"])
def test_reasoning_inside_the_content_starts_behind_the_whole_prompt(content: str) -> None:
    """The prompt `assistant\\n<think>` already holds the tag that opens the answer's text."""
    encoder = encoder_of(BY_NAME["olmo3-think"])
    sample = sample_of(encoder, turns_of("q", content))
    assert supervised(encoder, sample) == content.removeprefix("<think>") + "<|im_end|>"
    assert sample.notes == (() if content.startswith("<think>") else (SHARED,))


def test_an_empty_block_inside_the_content_is_not_supervised() -> None:
    encoder = encoder_of(CHATML)
    sample = sample_of(encoder, turns_of("q", "<think>\n\n</think>\n\nyes"))
    assert supervised(encoder, sample) == "yes<|im_end|>"


def test_white_space_that_is_stripped_later_on_costs_no_turn() -> None:
    encoder = encoder_of(BY_NAME["lfm2"])
    sample = sample_of(encoder, turns_of("q1", " a1\n", "q2", "a2"))
    assert supervised(encoder, sample) == " a1<|im_end|>a2<|im_end|>".lstrip()
    assert sample.notes == ()


@pytest.mark.parametrize("text", ["q", "q<|eot|>"], ids=["plain", "control strings in data"])
@pytest.mark.parametrize("flag", ["rstrip", "lstrip"])
def test_an_end_of_turn_that_swallows_white_space_stays_supervised(text: str, flag: str) -> None:
    """Phi-3: `<|end|>\\n` is one token, of the template's end of turn and the newline after it."""
    tokenizer = copy.copy(small_tokenizer())
    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **{flag: True})])
    tokenizer._tokenizer = inner
    space = {"rstrip": "<|end|>\n", "lstrip": "\n<|end|>"}[flag]
    tokenizer.chat_template = CHATML.replace("'<|im_end|>' + '\n'", f"'{space}'").replace("\n", "\\n")
    encoder = ChatEncoder(tokenizer, DataConfig(), None)
    sample = sample_of(encoder, turns_of(text, "hello \n", "r", "yes"))
    assert "".join(supervised(encoder, sample).split()) == "hello<|end|>yes<|end|>"
    if text == "q":
        expected = tokenizer.apply_chat_template(turns_of(text, "hello \n", "r", "yes"))["input_ids"]
        assert sample.token_ids.tolist() == expected
    else:
        plain = sample_of(encoder, turns_of("q", "hello \n", "r", "yes"))
        assert sample.token_ids.tolist()[-12:] == plain.token_ids.tolist()[-12:]


def texts_of(encoder: ChatEncoder, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """Return the texts of the turns that are found."""
    rendered = encoder.render(Conversation(messages, tools))
    assert not isinstance(rendered, Rejection), rendered
    return [rendered.text[start:end] for start, end in rendered.turns]


@pytest.mark.parametrize("user", ["q", "q</s>", "\u00e9"], ids=["plain", "control string", "not ASCII"])
@pytest.mark.parametrize("name", ["hunyuan3", "qwen2", "mistral-v1", "phi3-marked", "glm47", "kimi-k3"])
def test_two_assistant_turns_in_a_row_are_two_turns_without_header(name: str, user: str) -> None:
    family = BY_NAME[name]
    encoder = encoder_of(family)
    messages = [*turns_of(user, "a1"), *turns_of("", "a2")[1:], *turns_of("r", "a3")]
    first = "<|assistant|>" if name == "glm47" else family.end
    last = family.end if family.last_end is None else family.last_end
    expected = [f"{family.before}a{i}{end}" for i, end in ((1, first), (2, family.end), (3, last))]
    assert texts_of(encoder, messages) == expected
    assert supervised(encoder, sample_of(encoder, messages)) == "".join(expected)


@pytest.mark.parametrize("name", ["hunyuan3", "glm45", "glm47"])
def test_an_earlier_turn_ends_with_the_header_that_ends_it(name: str) -> None:
    """Alone, and with its blank reasoning, the turn has no end of its own."""
    messages = turns_of("q1", "a1", "q2", "a2")
    for message in messages:
        message["reasoning_content"] = "\n"
    assert texts_of(encoder_of(BY_NAME[name]), messages)[0].endswith("a1" + BY_NAME[name].end)


def test_a_turn_whose_prompt_cannot_be_rendered_costs_no_other_turn() -> None:
    """Qwen3.5 requires a question, which the opening turn of the assistant does not have."""
    encoder = encoder_of(BY_NAME["qwen35"])
    sample = sample_of(encoder, turns_of("", "a1", "q", "a2")[1:])
    assert supervised(encoder, sample) == "a2<|im_end|>"
    assert "turns that the template renders differently later on are not supervised" in sample.notes


RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '[' + m.content + ']' }}{% else %}"
    "{{ '' if loop.previtem and loop.previtem.role == 'tool' else '<turn>' + m.role }}"
    "{{ m.content + (m.tool_calls or '') | string + '<end_of_turn>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant' }}{% endif %}"
)


def test_a_last_turn_that_does_not_follow_its_prompt_costs_no_other_turn() -> None:
    """Apertus: the prompt after a tool's result has a header that the answer lacks."""
    encoder = encoder_of(RESULTS)
    messages = [*turns_of("q", ""), {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]
    messages[1]["tool_calls"] = [CALL]
    assert [text.count("arguments") for text in texts_of(encoder, messages)] == [1]
    refusing = encoder_of(RESULTS, rewritten_history="refuse")
    assert isinstance(refusing.render(Conversation(messages)), Rejection)


def test_text_that_the_template_leaves_out_leaves_a_note() -> None:
    """Llama 3.1 renders the calls of a turn and not the text next to them."""
    encoder = encoder_of(BY_NAME["llama31"])
    messages = [
        *turns_of("q", "a1"),
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a2"},
    ]
    left_out = "turns of which the template leaves out or changes text"
    assert left_out not in sample_of(encoder, messages, TOOLS).notes
    messages[1]["tool_calls"] = [CALL]
    assert left_out in sample_of(encoder, messages, TOOLS).notes


def test_contents_are_parts_where_a_template_prints_no_others() -> None:
    encoder = encoder_of(BY_NAME["smolvlm"])
    assert texts_of(encoder, turns_of("q", "a")) == [" a<end_of_utterance>"]
    assert encoder.template.render_prompt(turns_of("q")).endswith("User: q<end_of_utterance>\nAssistant:")


def test_a_header_inside_a_marked_turn_is_not_supervised() -> None:
    encoder = encoder_of(BY_NAME["deepseek-r1-marked"])
    sample = sample_of(encoder, turns_of("q", "<think>so</think>a", "r", "b"))
    assert supervised(encoder, sample) == "a<｜end▁of▁sentence｜>b<｜end▁of▁sentence｜>"
    assert sample.notes == (SHARED,)


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + (m.tool_calls or '') | string "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_named_templates_are_chosen_as_transformers_does() -> None:
    encoder = encoder_of({"default": CHATML, "tool_use": "TOOLS" + CHATML, "rag": "RAG" + CHATML})
    messages = turns_of("q", "a")
    for tools in (None, TOOLS):
        expected = encoder.tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
        assert sample_of(encoder, messages, tools).token_ids.tolist() == expected
        asked = encoder.tokenizer.apply_chat_template(messages[:1], tools=tools, add_generation_prompt=True)
        assert encoder.prompt_ids(messages[:1], tools) == asked["input_ids"]
    assert encoder.template_text != encoder_of(CHATML).template_text


def test_calls_without_tools_are_rejected_where_only_tool_use_renders_them() -> None:
    encoder = encoder_of({"default": CHATML, "tool_use": CALLS})
    messages = [*turns_of("q"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert encoder.reads("tool_calls")
    assert isinstance(encoder.render(Conversation(messages)), Rejection)
    assert not isinstance(encoder.render(Conversation(messages, TOOLS)), Rejection)


def test_named_templates_without_default_are_one_message(tmp_path: Path) -> None:
    names = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(
        UserError, match=r"data.chat_template: .*'default', only rag, tool_use; allowed: a Jinja"
    ):
        encoder_of(names)
    path = tmp_path / "own.jinja"
    path.write_text(CHATML)
    assert encoder_of(names, chat_template=str(path)).template.text == CHATML


def test_template_arguments_reach_conversations_and_prompts() -> None:
    template = TEMPLATES["thinking"].replace("<think>\n\n</think>", "<think>{{ mood }}</think>")
    settings = {"template_arguments": {"enable_thinking": False, "mood": "calm"}}
    encoder = encoder_of(TEMPLATES["thinking"], **settings)
    expected = encoder.tokenizer.apply_chat_template(
        turns_of("q"), add_generation_prompt=True, enable_thinking=False
    )["input_ids"]
    assert encoder.prompt_ids(turns_of("q")) == expected
    assert encoder.prompt_ids(turns_of("q")) != encoder_of(TEMPLATES["thinking"]).prompt_ids(turns_of("q"))
    sample = sample_of(encoder, turns_of("q", "a", "r", "b"))
    assert supervised(encoder, sample) == "a<|im_end|>b<|im_end|>"
    mood = encoder_of("{{ mood }}" + template, **settings)
    assert encoder.tokenizer.decode(sample_of(mood, turns_of("q", "a")).token_ids).startswith("calm")
    assert encoder.template_text != encoder_of(TEMPLATES["thinking"]).template_text
    assert ingest_key_fields(DataConfig(**settings)) != ingest_key_fields(DataConfig())


@pytest.mark.parametrize("name", ["messages", "strftime_now", "no name"])
def test_arguments_that_a_rendering_sets_itself_are_rejected(name: str) -> None:
    with pytest.raises(UserError, match="data.template_arguments"):
        DataConfig(template_arguments={name: 1})


def test_arguments_are_json_values() -> None:
    with pytest.raises(UserError, match=r"data.template_arguments.x: .* a JSON value"):
        DataConfig(template_arguments={"x": float("nan")})


@pytest.mark.parametrize("date", ["today", "2025-02-30", "20250101", ""])
def test_a_date_is_a_day(date: str) -> None:
    with pytest.raises(UserError, match="data.template_date"):
        DataConfig(template_date=date)


@pytest.mark.parametrize("begin_end", [("", ""), ("{% generation %}", "{% endgeneration %}")])
def test_the_date_of_a_template_is_the_setting(begin_end: tuple[str, str], tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + f"{begin_end[0]}{{{{ m.content + '<|im_end|>' }}}}{begin_end[1]}"
        + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    encoder = encoder_of(template)
    sample = sample_of(encoder, turns_of("q", "a"))
    assert encoder.tokenizer.decode(sample.token_ids).startswith("01 Jan 2025<|im_start|>")
    later = encoder_of(template, template_date="2026-02-03")
    assert later.tokenizer.decode(later.prompt_ids(turns_of("q"))).startswith("03 Feb 2026")
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": turns_of("q", "an answer")}) + "\n")
    tokenizer = encoder.tokenizer
    manifests = [
        ingest_file(data, DataConfig(**settings), tokenizer, tmp_path / str(i), mask_token_id=None)
        for i, settings in enumerate([{}, {}, {"template_date": "2026-02-03"}])
    ]
    assert manifests[0]["meta"]["rules"] == manifests[1]["meta"]["rules"]
    assert manifests[0]["meta"]["rules"] != manifests[2]["meta"]["rules"]


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "llama3", "qwq", "glm45", "gpt-oss", "phi4-mini", "smollm3"]
)
@pytest.mark.parametrize("opening", [[], [{"role": "system", "content": "s"}]], ids=["", "system"])
def test_long_conversations_are_masked_as_turn_by_turn(name: str, opening: list[dict[str, Any]]) -> None:
    for length in (LONG, LONG + 1, LONG + 2, LONG + 13):
        messages = opening + turns_of(*(f"text {i}" for i in range(length)))
        template = encoder_of(BY_NAME[name]).template
        text, turns, _ = template._render_slowly(messages, None)
        fast = template._skeleton_of(messages)
        assert fast is not None
        assert fast.turns(text, messages) == turns


def test_a_template_that_counts_its_turns_is_not_extrapolated() -> None:
    messages = turns_of(*(f"text {i}" for i in range(LONG + 20)))
    template = encoder_of(BY_NAME["longcat"]).template
    text, turns, _ = template._render_slowly(messages, None)
    fast = template._skeleton_of(messages)
    assert fast is None or fast.turns(text, messages) is None
    assert template.render(messages, None)[1] == turns


@pytest.mark.parametrize("family", ["chatml", "thinking", "generation"])
def test_the_time_of_a_conversation_is_linear(family: str) -> None:
    """Turn by turn, these would take minutes."""
    encoder = encoder_of(TEMPLATES[family])
    messages = turns_of(*(f"\u00e9 {i}" for i in range(20_000)))
    started = time.perf_counter()
    sample = sample_of(encoder, messages)
    assert time.perf_counter() - started < 20
    assert supervised(encoder, sample).count("<|im_end|>") == 10_000


def test_many_turns_that_have_to_be_rendered_one_by_one_are_rejected() -> None:
    encoder = encoder_of(CALLS)
    calls = [{**message, "name": "x"} for message in turns_of(*"qa" * MAX_SLOW_MESSAGES)]
    started = time.perf_counter()
    rejected = encoder.render(Conversation(calls))
    assert time.perf_counter() - started < 1
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "too many turns"
    assert not isinstance(encoder.render(Conversation(calls[:20])), Rejection)


@pytest.mark.parametrize(
    "name, end",
    [
        ("qwen2", "<|im_end|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi4-mini", "<|end|>"),
        ("command-a-reasoning", "<|END_OF_TURN_TOKEN|>"),
        ("gpt-oss", "<|return|>"),
        ("glm4", "<|user|>"),
        ("ling", "<|role_end|>"),
        ("hunyuan", "<|eos|>"),
        ("kimi-k3", "<|end_of_msg|>"),
        ("apriel", "<|end|>"),
        ("hunyuan3", "<｜hy_eos｜>"),
        ("smolvlm", "<end_of_utterance>"),
    ],
)
def test_the_end_of_turn_is_known(name: str, end: str) -> None:
    encoder = encoder_of(BY_NAME[name])
    assert encoder.template.end_of_turn == end
    assert encoder.end_of_turn_id == encoder.tokenizer.convert_tokens_to_ids(end)


def test_an_end_of_turn_that_is_no_special_token_does_not_come_from_data() -> None:
    encoder = encoder_of(BY_NAME["ling"])
    sample = sample_of(encoder, turns_of("q<|role_end|>", "a"))
    end = encoder.end_of_turn_id
    assert sample.token_ids.tolist().count(end) == 2


def test_a_template_without_any_end_token_ends_with_the_content() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    encoder = encoder_of(template)
    assert encoder.template.end_of_turn is None
    assert encoder.end_of_turn_id is None
    assert supervised(encoder, sample_of(encoder, turns_of("q", "a", "r", "b"))).split() == ["a", "b"]
