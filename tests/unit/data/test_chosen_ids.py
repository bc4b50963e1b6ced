"""Rows whose text encodes to other ids than the target chose keep the ids; all others stay text."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.data.answers import Answer
from dflash_core.data.chat import ChatEncoder, Conversation, Rejection
from dflash_core.data.chosen_ids import GeneratedTurn, chosen_ids
from tests.support.chat_families import MASK_TOKEN_ID, small_tokenizer

Message = dict[str, Any]


def turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def ids(text: str) -> list[int]:
    """Return the ids of a text; control strings give control tokens."""
    return small_tokenizer()(text, add_special_tokens=False)["input_ids"]


class Written:
    """A conversation of a family whose assistant turns decode to the texts of the given ids."""

    def __init__(self, family: str, *answers: list[int] | str, **changes: Any) -> None:
        tokenizer = copy.deepcopy(small_tokenizer("chatml" if family == FORGETFUL else family))
        if family == FORGETFUL:
            tokenizer.chat_template = FORGETFUL
        self.encoder = ChatEncoder(tokenizer, DataConfig(), MASK_TOKEN_ID)
        self.generated: dict[int, GeneratedTurn] = {}
        self.messages: list[Message] = []
        end = self.encoder.end_of_turn_id
        for number, chosen in enumerate(answers):
            self.messages.append(turn("user", f"What is {number}?"))
            prompt = self.encoder.prompt_ids(self.messages)
            assert not isinstance(prompt, Rejection)
            known = chosen if isinstance(chosen, list) else None
            text = small_tokenizer().decode(known, skip_special_tokens=True) if known else str(chosen)
            reason = "stop" if known is None or known[-1] == end else "length"
            num_tokens = changes.get("num_tokens", len(known or ()))
            self.messages.append(turn("assistant", text))
            answer = Answer(self.messages[-1], reason, num_tokens, known)
            self.generated[len(self.messages) - 1] = GeneratedTurn(prompt, answer)
        self.conversation = Conversation(self.messages, None, frozenset(changes.get("open_ends", ())))

    def chosen(self) -> list[tuple[str, int]] | None:
        """Return the chosen ids as runs of text and their mask; None if the text encodes to them."""
        tokens, self.num_other_ids = chosen_ids(self.encoder, self.conversation, self.generated)
        if tokens is None:
            return None
        runs: list[tuple[list[int], int]] = []
        for token, is_supervised in zip(tokens.token_ids, tokens.loss_mask, strict=True):
            if not runs or runs[-1][1] != is_supervised:
                runs.append(([], is_supervised))
            runs[-1][0].append(token)
        self.token_ids = tokens.token_ids
        return [(small_tokenizer().decode(run), is_supervised) for run, is_supervised in runs]


# A template that renders an answer as three dots once the conversation goes on.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else '...' }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = {"llama": "<|eot|>", "gemma": "<end_of_turn>"}


@pytest.mark.parametrize("family", ["chatml", "gemma", "generation"])
def test_text_that_encodes_to_the_chosen_ids_stays_text(family: str) -> None:
    answers = [ids(text + END.get(family, "<|im_end|>")) for text in ("yes", "hello world")]
    assert Written(family, *answers).chosen() is None


def test_a_prompt_whose_last_blanks_the_whole_splits_otherwise_is_kept() -> None:
    """The target saw one token of two newlines; before a word they encode to two tokens."""
    row = Written("llama", ids("yes<|eot|>"))
    assert row.generated[1].prompt_ids[-1:] == ids("\n\n")
    assert len(ids("\n\nyes")) == 3
    assert row.chosen() is not None
    assert row.token_ids == [*row.generated[1].prompt_ids, *ids("yes<|eot|>")]


def test_a_leading_blank_that_the_template_strips_is_kept() -> None:
    end = "<end_of_turn>"
    row = Written("gemma", ids(f" hello world{end}"), ids(f"yes{end}"), ids(f"\n\nhello{end}"))
    question = f"<turn>user\nWhat is {{}}?{end}\n<turn>model\n"
    assert row.chosen() == [
        ("<bos>" + question.format(0), 0),
        (f" hello world{end}", 1),
        ("\n" + question.format(1), 0),
        (f"yes{end}", 1),
        ("\n" + question.format(2), 0),
        (f"\n\nhello{end}", 1),
        ("\n", 0),
    ]


def test_another_split_of_a_word_is_kept() -> None:
    letters = [token for letter in "hello" for token in ids(letter)]
    assert letters != ids("hello")
    row = Written("chatml", ids("yes<|im_end|>"), [*letters, *ids("<|im_end|>")])
    runs = row.chosen()
    assert runs is not None
    assert [text for text, is_supervised in runs if is_supervised] == ["yes<|im_end|>", "hello<|im_end|>"]
    position = len(row.generated[3].prompt_ids)
    assert row.token_ids[position : position + 5] == letters


def test_special_tokens_that_the_text_lacks_are_kept() -> None:
    runs = Written("chatml", ids("<turn>hello<|im_end|>")).chosen()
    assert runs is not None
    assert runs[1] == ("<turn>hello<|im_end|>", 1)


def test_another_end_token_is_kept() -> None:
    row = Written("chatml", ids("hello<|endoftext|>"), ids("yes<|im_end|>"))
    row.generated[1] = GeneratedTurn(
        row.generated[1].prompt_ids, Answer(row.messages[1], "stop", 2, ids("hello<|endoftext|>"))
    )
    runs = row.chosen()
    assert runs is not None
    assert [text for text, is_supervised in runs if is_supervised] == ["hello<|endoftext|>", "yes<|im_end|>"]


def test_a_cut_turn_stays_text_up_to_its_last_word() -> None:
    cut = ids("hello world \n")
    assert Written("chatml", cut, ids("yes<|im_end|>"), open_ends=[1]).chosen() is None
    assert Written("chatml", ids("yes<|im_end|>"), cut, open_ends=[3]).chosen() is None
    # A closed turn gets the end of turn that the template writes.
    assert Written("chatml", cut).chosen() is None
    runs = Written("gemma", ids(" hello"), ids("yes<end_of_turn>"), open_ends=[1]).chosen()
    assert runs is not None
    assert runs[1] == (" hello", 1)
    assert runs[2][0].startswith("<end_of_turn>\n<turn>user")
    runs = Written("gemma", ids(" hello")).chosen()
    assert runs is not None
    assert runs[1] == (" hello<end_of_turn>", 1)


def test_where_earlier_turns_are_rewritten_the_last_prompt_and_answer_are_kept() -> None:
    letters = [token for letter in "hello" for token in ids(letter)]
    row = Written(FORGETFUL, ids("yes<|im_end|>"), [*letters, *ids("<|im_end|>")])
    assert row.chosen() == [
        (small_tokenizer().decode(row.generated[3].prompt_ids), 0),
        ("hello<|im_end|>", 1),
    ]
    assert row.token_ids[len(row.generated[3].prompt_ids) :] == [*letters, *ids("<|im_end|>")]
    # The text of the last turn encodes to what the target chose.
    assert Written(FORGETFUL, ids("yes<|im_end|>"), ids("hello<|im_end|>")).chosen() is None


@pytest.mark.parametrize("num_tokens, expected", [(0, 0), (1, 0), (2, 0), (3, 1), (9, 1)])
def test_text_of_an_endpoint_is_counted_where_its_ids_differ(num_tokens: int, expected: int) -> None:
    """The text encodes to 2 ids with its end token, which an endpoint need not count."""
    row = Written("chatml", "hello", num_tokens=num_tokens)
    assert len(ids("hello<|im_end|>")) == 2
    assert row.chosen() is None
    assert row.num_other_ids == expected


def test_a_row_that_cannot_be_encoded_is_left_to_ingest() -> None:
    row = Written("chatml", ids("yes<|im_end|>"))
    row.messages[0]["content"] = "<|mask|>"
    assert row.chosen() is None
