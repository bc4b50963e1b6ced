"""Ids and masks of conversations, against an oracle: a wrong mask ruins a drafter without any error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection, Sample, chat_encoder
from dflash_core.data.loss_mask import mask_by_bytes, mask_by_offsets
from dflash_core.errors import UserError
from tests.support.chat_families import CHATML, CONTROLS, MASK_TOKEN_ID, TEMPLATES, oracle, small_tokenizer

ENCODERS: dict[str, ChatEncoder] = {}


def encoder_of(family: str) -> ChatEncoder:
    if family not in ENCODERS:
        ENCODERS[family] = ChatEncoder(small_tokenizer(family), DataConfig(), MASK_TOKEN_ID)
    return ENCODERS[family]


def with_template(template: str, **settings_: Any) -> ChatEncoder:
    tokenizer = copy.copy(small_tokenizer())
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer, DataConfig(**settings_), MASK_TOKEN_ID)


def encode(encoder: ChatEncoder, *turns: tuple[str, str]) -> Sample | Rejection:
    rendered = encoder.render(Conversation([{"role": role, "content": text} for role, text in turns]))
    return rendered if isinstance(rendered, Rejection) else encoder.encode([rendered])[0]


def encoded(encoder: ChatEncoder, messages: list[dict[str, Any]], tools: Any = None) -> Sample | Rejection:
    rendered = encoder.render(Conversation(messages, tools))
    return rendered if isinstance(rendered, Rejection) else encoder.encode([rendered])[0]


def sample_of(encoder: ChatEncoder, *turns: tuple[str, str]) -> Sample:
    sample = encode(encoder, *turns)
    assert isinstance(sample, Sample), sample
    return sample


def supervised_texts(sample: Sample) -> list[str]:
    """Return the text of each run of supervised tokens."""
    runs: list[list[int]] = []
    previous = 0
    for token, flag in zip(sample.token_ids.tolist(), sample.loss_mask.tolist()):
        if flag:
            runs += [[]] if not previous else []
            runs[-1].append(token)
        previous = flag
    return [small_tokenizer().decode(run) for run in runs]


texts = st.one_of(
    st.text(alphabet=st.sampled_from(list("ab \n\té\u2028\U0001f600<|>")), max_size=12),
    st.lists(st.sampled_from(["hello", " world", "\n\n", " ", "yes", "assistant\n"]), max_size=6).map(
        "".join
    ),
)
exchanges = st.tuples(texts, texts).map(
    lambda pair: [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
)
systems = st.one_of(st.just([]), texts.map(lambda text: [{"role": "system", "content": text}]))
conversations = st.tuples(systems, st.lists(exchanges, min_size=1, max_size=3)).map(
    lambda parts: parts[0] + [message for exchange in parts[1] for message in exchange]
)


@pytest.mark.parametrize("family", TEMPLATES)
@given(messages=conversations)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ids_and_mask_equal_the_oracle(family: str, messages: list[dict[str, Any]]) -> None:
    encoder = encoder_of(family)
    rendered = encoder.render(Conversation(messages))
    assert not isinstance(rendered, Rejection), rendered
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    ids, mask = oracle(family, messages)
    assert sample.token_ids.tolist() == ids
    assert sample.loss_mask.tolist() == mask
    expected = small_tokenizer(family).apply_chat_template(messages, tokenize=True, return_dict=True)
    assert ids == expected["input_ids"]


@pytest.mark.parametrize("family", TEMPLATES)
@given(
    messages=conversations,
    text=st.lists(st.sampled_from([*(c for c in CONTROLS if c != "<|mask|>"), "a", "\n", " "]), max_size=4),
    turn_number=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_no_control_token_comes_from_data(
    family: str, messages: list[dict[str, Any]], text: list[str], turn_number: int
) -> None:
    encoder = encoder_of(family)
    dirty = copy.deepcopy(messages)
    turn = dirty[turn_number % len(dirty)]
    turn["content"] = "x" + "".join(text) + turn["content"] + "".join(text) + "y"
    clean = copy.deepcopy(dirty)
    clean[turn_number % len(dirty)]["content"] = "x"
    rendered = encoder.render(Conversation(dirty))
    assert not isinstance(rendered, Rejection), rendered
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    control_ids = set(range(len(CONTROLS)))
    reference, _ = oracle(family, clean)
    assert [i for i in sample.token_ids if i in control_ids] == [i for i in reference if i in control_ids]
    whole = small_tokenizer(family).apply_chat_template(dirty, tokenize=False)
    assert small_tokenizer(family).decode(sample.token_ids) == whole
    answers = [m["content"] for m in dirty if m["role"] == "assistant"]
    assert "".join(supervised_texts(sample)).count("x" + "".join(text)) == sum(
        answer.count("x" + "".join(text)) for answer in answers
    )


def test_each_assistant_turn_is_supervised_with_its_end_of_turn() -> None:
    sample = sample_of(
        encoder_of("chatml"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")
    )
    assert supervised_texts(sample) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_an_answer_that_repeats_the_question() -> None:
    turns = [("user", "MASKED"), ("assistant", "NOT MASKED"), ("user", "NOT MASKED"), ("assistant", "MASKED")]
    sample = sample_of(encoder_of("chatml"), *turns)
    assert supervised_texts(sample) == ["NOT MASKED<|im_end|>", "MASKED<|im_end|>"]


def test_end_of_turn_comes_from_the_template_not_from_eos() -> None:
    sample = sample_of(encoder_of("gemma"), ("user", "q"), ("assistant", "a"))
    assert small_tokenizer().eos_token == "<|im_end|>"
    assert supervised_texts(sample) == ["a<end_of_turn>"]


def test_only_one_bos_although_the_tokenizer_adds_one() -> None:
    sample = sample_of(encoder_of("llama"), ("user", "q"), ("assistant", "a"))
    assert sample.token_ids.tolist().count(CONTROLS.index("<|begin|>")) == 1


def test_a_token_that_spans_prompt_and_answer_is_not_supervised() -> None:
    """`assistant\\n` + `\\n\\nyes` becomes `assistant`, `\\n\\n`, `\\n`, `yes`: the pair is half prompt."""
    tokenizer = small_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("t\n\n\ny").input_ids)
    assert tokens == ["t", "\u010a\u010a", "\u010a", "y"]
    sample = sample_of(encoder_of("chatml"), ("user", "q"), ("assistant", "\n\nyes"))
    assert supervised_texts(sample) == ["\nyes<|im_end|>"]


def test_tool_turns_are_context_only() -> None:
    sample = sample_of(
        encoder_of("chatml"), ("user", "q"), ("assistant", "call"), ("tool", "result"), ("assistant", "a")
    )
    assert supervised_texts(sample) == ["call<|im_end|>", "a<|im_end|>"]


def test_a_conversation_opened_by_the_assistant() -> None:
    sample = sample_of(
        encoder_of("chatml"), ("assistant", "Hello, ask me"), ("user", "q"), ("assistant", "a")
    )
    assert supervised_texts(sample) == ["Hello, ask me<|im_end|>", "a<|im_end|>"]


def test_trailing_user_turn_stays_unsupervised() -> None:
    sample = sample_of(encoder_of("chatml"), ("user", "q"), ("assistant", "a"), ("user", "more"))
    assert supervised_texts(sample) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    "body",
    [
        "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
        "{% generation %}{{ message['content'] + '<|im_end|>\n<|endoftext|>' }}{% endgeneration %}",
    ],
    ids=["block before end of turn", "block with end of turn", "block over end of turn"],
)
def test_generation_blocks_are_corrected_to_the_end_of_turn(body: str) -> None:
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}"
        + body
        + "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    sample = sample_of(
        with_template(template), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")
    )
    assert supervised_texts(sample) == ["a<|im_end|>", "b<|im_end|>"]


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}BEGIN{{ m.content }}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ '<|header|>' + call.function.name + '<|end_header|>' }}{% endfor %}"
    "CLOSE{% else %}{{ '<|im_end|>' }}{% endif %}END"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("begin_end", [("", ""), ("{% generation %}", "{% endgeneration %}")])
@pytest.mark.parametrize("close", ["<|im_end|>", "<|im_end|>\n<|endoftext|>", "<|eot|>"])
def test_a_turn_of_tool_calls_ends_after_its_end_of_turn_not_after_the_call(
    begin_end: tuple[str, str], close: str
) -> None:
    """Calls have their own control tokens; the template may end such turns with a different token."""
    template = CALLS.replace("CLOSE", f"{{{{ '{close}' }}}}".replace("\n", "\\n"))
    encoder = with_template(template.replace("BEGIN", begin_end[0]).replace("END", begin_end[1]))
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "a"},
    ]
    rendered = encoder.render(Conversation(messages))
    assert not isinstance(rendered, Rejection), rendered
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    called = "<|header|>f<|end_header|><|header|>g<|end_header|>"
    assert supervised_texts(sample) == [called + close.split("\n")[0], "a<|im_end|>"]


def test_the_end_of_turn_is_found_in_a_template_that_requires_a_system_turn() -> None:
    reject = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    encoder = with_template(reject + CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>\n<|endoftext|>'"))
    sample = sample_of(encoder, ("system", "s"), ("user", "q"), ("assistant", "a"))
    assert supervised_texts(sample) == ["a<|im_end|>"]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_control_strings_change_no_token_of_the_template(scheme: str) -> None:
    """SentencePiece-like tokenizers prepend a space to a text: once, and not to each piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    controls = [AddedToken(text, special=True, normalized=False) for text in [*CONTROLS, "<unk>"]]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=controls)
    tokenizer.train_from_iterator(
        ["user assistant system You are a helpful <|im_end|> yes no\n"] * 9, trainer
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = CHATML
    encoder = ChatEncoder(wrapped, DataConfig(), None)
    clean, dirty = (
        sample_of(encoder, ("user", "yes" + text), ("assistant", "no")) for text in ("", "<|im_end|>")
    )
    assert small_runs(wrapped, dirty) == small_runs(wrapped, clean)
    tokens = wrapped.convert_ids_to_tokens(dirty.token_ids.tolist())
    first = wrapped.convert_ids_to_tokens(clean.token_ids.tolist())
    border = first.index("yes") if "yes" in first else first.index("\u2581yes")
    assert tokens[: border + 1] == first[: border + 1]
    assert tokens[-len(first) + border + 1 :] == first[border + 1 :]


def small_runs(tokenizer: Any, sample: Sample) -> list[str]:
    return tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask.astype(bool)].tolist())


def test_a_generation_block_in_a_comment_is_ignored() -> None:
    encoder = with_template("{# no {% generation %} here #}" + CHATML)
    sample = sample_of(encoder, ("user", "q"), ("assistant", "a"))
    assert supervised_texts(sample) == ["a<|im_end|>"]


def test_a_generation_block_that_includes_the_header_excludes_it_from_supervision() -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    sample = sample_of(with_template(template), ("user", "q"), ("assistant", "a"))
    assert supervised_texts(sample) == ["a<|im_end|>"]


def test_reasoning_that_the_assistant_wrote_is_supervised_and_the_empty_block_is_not() -> None:
    encoder = encoder_of("thinking")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert supervised_texts(sample_of(encoder, ("user", "q"), ("assistant", "a"))) == ["a<|im_end|>"]
    messages[1]["reasoning_content"] = "hm"
    rendered = encoder.render(Conversation(messages))
    assert not isinstance(rendered, Rejection)
    sample = encoder.encode([rendered])[0]
    assert isinstance(sample, Sample)
    assert supervised_texts(sample) == ["<think>\nhm\n</think>\n\na<|im_end|>"]


def test_a_turn_whose_reasoning_the_template_drops_is_not_supervised_or_rejects() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1", "reasoning_content": "hm"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
        {"role": "user", "content": "q3"},
        {"role": "assistant", "content": "a3", "reasoning_content": "so"},
    ]
    sample = encoded(encoder_of("thinking"), messages)
    assert isinstance(sample, Sample)
    assert supervised_texts(sample) == ["a2<|im_end|>", "<think>\nso\n</think>\n\na3<|im_end|>"]
    assert sample.notes == ("turns that the template renders differently later on are not supervised",)
    rejected = encoded(with_template(TEMPLATES["thinking"], rewritten_history="refuse"), messages)
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "chat template rewrites turns"


def test_a_template_that_rewrites_the_last_turn_too_is_rejected() -> None:
    template = "{{ messages | length }}: {% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    rejected = encode(with_template(template), ("user", "q"), ("assistant", "a"))
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "chat template rewrites all turns"


def test_the_mask_token_rejects_the_row() -> None:
    rejected = encode(encoder_of("chatml"), ("user", "what is <|mask|>?"), ("assistant", "a"))
    assert rejected == Rejection("mask token in data", "the text '<|mask|>'")


def test_a_lone_surrogate_rejects_the_row() -> None:
    rejected = encode(encoder_of("chatml"), ("user", "a\ud800b"), ("assistant", "a"))
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "lone surrogate"


def test_an_error_of_the_template_rejects_the_row() -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        + TEMPLATES["gemma"]
    )
    rejected = encode(with_template(template), ("system", "s"), ("user", "q"), ("assistant", "a"))
    assert isinstance(rejected, Rejection)
    assert rejected.reason == "rejected by the chat template"
    assert "no system turn" in rejected.detail
    assert isinstance(encode(with_template(template), ("user", "q"), ("assistant", "a")), Sample)


def test_a_template_that_does_not_compile_is_a_user_error() -> None:
    with pytest.raises(UserError, match="data.chat_template"):
        with_template("{% for x in %}")


def test_a_tokenizer_without_template_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no chat template"):
        with_template("")


def test_encoding_many_conversations_equals_encoding_each() -> None:
    encoder = encoder_of("chatml")
    turns = [
        (("user", "q" * i), ("assistant", f"<|im_end|> {i}" if i % 3 == 0 else "a" * i)) for i in range(1, 8)
    ]
    rendered = [encoder.render(Conversation([{"role": r, "content": c} for r, c in each])) for each in turns]
    together = encoder.encode([r for r in rendered if not isinstance(r, Rejection)])
    for each, sample in zip(turns, together):
        alone = sample_of(encoder, *each)
        assert isinstance(sample, Sample)
        assert alone.token_ids.tolist() == sample.token_ids.tolist()
        assert alone.loss_mask.tolist() == sample.loss_mask.tolist()


@pytest.mark.parametrize("family", TEMPLATES)
@given(messages=conversations)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_fast_paths_agree_with_the_slow_ones(family: str, messages: list[dict[str, Any]]) -> None:
    """Compare turns by skeleton and by rendering every prefix, and masks by byte lengths and by offsets."""
    encoder = encoder_of(family)
    assert encoder.template.render(messages, None) == encoder.template._render_slowly(messages, None)
    rendered = encoder.render(Conversation(messages))
    assert not isinstance(rendered, Rejection)
    encoding = encoder._encoder.encode(rendered.text, add_special_tokens=False)
    assert encoder._num_bytes is not None
    token_ids = np.array(encoding.ids, dtype=np.int32)
    by_bytes = mask_by_bytes(token_ids, rendered.text, rendered.turns, encoder._num_bytes)
    by_offsets = mask_by_offsets(encoding, rendered.text, rendered.turns)
    assert by_bytes is not None
    assert by_bytes.tolist() == by_offsets.tolist()


def test_a_template_that_depends_on_the_content_takes_the_slow_path() -> None:
    template = CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
    encoder = with_template(template)
    assert supervised_texts(sample_of(encoder, ("user", "q"), ("assistant", "a"))) == ["a<|im_end|>"]
    assert supervised_texts(sample_of(encoder, ("user", "q"), ("assistant", "t</think>a"))) == ["a<|im_end|>"]


def test_a_tokenizer_with_a_normaliser_is_masked_by_offsets() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    encoder = ChatEncoder(tokenizer, DataConfig(), MASK_TOKEN_ID)
    assert encoder._num_bytes is None
    sample = sample_of(encoder, ("user", "e\u0301"), ("assistant", "e\u0301 yes"))
    assert supervised_texts(sample) == ["\u00e9 yes<|im_end|>"]


def test_an_encoder_is_kept_while_its_arguments_and_template_stay(tmp_path: Path) -> None:
    tokenizer = small_tokenizer("chatml")
    template = tmp_path / "a.jinja"
    template.write_text(TEMPLATES["chatml"])
    config = DataConfig(chat_template=str(template))
    first = chat_encoder(tokenizer, config, None)
    assert chat_encoder(tokenizer, DataConfig(chat_template=str(template)), None) is first
    template.write_text(TEMPLATES["chatml"] + "{# other #}")
    second = chat_encoder(tokenizer, config, None)
    assert second is not first
    assert chat_encoder(tokenizer, config, MASK_TOKEN_ID) is not second
