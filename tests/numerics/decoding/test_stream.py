"""One prompt as a stream of steps: the tokens, drafts and texts are those of the decoders."""

from __future__ import annotations

import pytest

from benchmarks.support.tiny_target import make_tiny_tokenizer
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import plain_decode, speculative_decode
from dflash_core.decoding.stream import StreamedAnswer, TextStream, decode_both, printable
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.target import Target
from tests.support.decoding_cases import BLOCK, PROMPTS, KnowingContext


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_a_character_appears_with_its_last_token() -> None:
    stream = TextStream(Bytes())
    assert [stream.add(byte) for byte in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]


def test_bytes_that_are_no_text_appear_with_what_follows() -> None:
    stream = TextStream(Bytes())
    assert [stream.add(byte) for byte in b"a\xffb"] == ["a", "", "\ufffdb"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\r\x07", r"a\x1b[2Jb\r\x07"),
        ("line\n\tindented", "line\n\tindented"),
        ("\u202eevil\u2028", r"\u202eevil\u2028"),
        ("\x9b31m\ud800", r"\x9b31m\ud800"),
        ("e\u0301 \U0001f468\u200d\U0001f469", "e\u0301 \U0001f468\u200d\U0001f469"),
    ],
)
def test_what_controls_a_terminal_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_both_answers_are_those_of_the_decoders(target: Target, drafter: DFlashDrafter) -> None:
    tokenizer, sampling = make_tiny_tokenizer(), Sampling(max_new_tokens=20)
    for prompt in PROMPTS[:2]:
        plain, speculative = decode_both(target, drafter, tokenizer, prompt, sampling)
        [expected] = plain_decode(target, [prompt], sampling).generations
        assert plain.token_ids == expected.token_ids
        assert [step.num_tokens for step in plain.steps] == [1] * 20
        assert plain.acceptance_length == 1
        [expected] = speculative_decode(target, drafter, [prompt], sampling).generations
        assert speculative.token_ids == expected.token_ids
        assert [step.num_tokens for step in speculative.steps] == [1, *expected.emitted]
        assert speculative.accepted == sum(expected.accepted)
        assert speculative.drafted == sum(expected.drafted)
        assert plain.text == speculative.text


def test_accepted_drafts_are_the_first_tokens_of_a_step(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext]
) -> None:
    """A drafter that knows two tokens of each block: nine steps of two drafts and the bonus."""
    knowing.right = 2
    sampling = Sampling(max_new_tokens=28)
    _, speculative = decode_both(target, drafter, make_tiny_tokenizer(), PROMPTS[0], sampling)
    assert [step.accepted for step in speculative.steps] == [0, *[2] * 9]
    assert speculative.acceptance_length == 3
    for step in speculative.steps[1:]:
        assert step.drafted == BLOCK - 1 or step is speculative.steps[-1]
        flags = [is_draft for _, is_draft in step.pieces]
        # A token within a character has no text.
        assert flags == sorted(flags, reverse=True)
        assert sum(flags) <= step.accepted


def test_the_part_known_after_some_seconds(target: Target, drafter: DFlashDrafter) -> None:
    _, answer = decode_both(target, drafter, make_tiny_tokenizer(), PROMPTS[0], Sampling(max_new_tokens=6))
    first = answer.steps[0].seconds
    assert answer.after(0.0) == StreamedAnswer()
    assert answer.after(first).token_ids == answer.token_ids[:1]
    assert answer.after(1e6) == answer
