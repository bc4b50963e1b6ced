"""Local batched decoding for regeneration gives the same answers as decoding one by one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.tiny_target import make_tiny_tokenizer
from dflash_core.config import RegenerateConfig
from dflash_core.data.answers import Answer, Request
from dflash_core.data.chat import Rejection
from dflash_core.decoding.generate import BatchDecoder
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_decode
from dflash_core.target.target import Target

PROMPTS = ["def area", "for name in names:", "The target accepts the longest run it would have written", "if"]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(tiny_target_dir, layer_ids=[0], compute_dtype="float32")


def requests(tokenizer: Any) -> deque[Request]:
    return deque(
        Request(f"{n:032x}", [], None, tokenizer(text)["input_ids"]) for n, text in enumerate(PROMPTS)
    )


def answers(target: Target, **settings: Any) -> dict[str, Answer | Rejection]:
    decoder = BatchDecoder(target, make_tiny_tokenizer(), RegenerateConfig(**settings), {"model": "tiny"})
    return {request.key: answer for request, answer in decoder.answers(requests(decoder.tokenizer))}


def test_batches_answer_as_one_by_one(target: Target) -> None:
    tokenizer = make_tiny_tokenizer()
    by_key = answers(target, batch_size=3, max_new_tokens=7)
    for request in requests(tokenizer):
        prompt = Prompt(token_ids=tuple(request.token_ids))
        [alone] = plain_decode(target, [prompt], Sampling(max_new_tokens=7)).generations
        answer = by_key[request.key]
        assert isinstance(answer, Answer)
        text = tokenizer.decode(alone.token_ids, skip_special_tokens=True)
        assert answer.message == {"role": "assistant", "content": text.rstrip("\ufffd")}
        assert (answer.finish_reason, answer.num_tokens) == ("length", 7)
        assert answer.token_ids == alone.token_ids


def test_an_end_token_ends_an_answer_and_is_no_part_of_its_text(target: Target) -> None:
    prompt = Prompt(token_ids=tuple(requests(make_tiny_tokenizer())[0].token_ids))
    first = plain_decode(target, [prompt], Sampling(max_new_tokens=4)).generations[0].token_ids
    earlier, target.eos_ids = target.eos_ids, (first[2],)
    try:
        answer = answers(target, max_new_tokens=4)[f"{0:032x}"]
    finally:
        target.eos_ids = earlier
    assert isinstance(answer, Answer)
    assert (answer.finish_reason, answer.num_tokens) == ("stop", first.index(first[2]) + 1)
    # This end token is not a special one.
    ended = first[: first.index(first[2])]
    assert answer.message["content"] == make_tiny_tokenizer().decode(ended)
    assert answer.token_ids == [*ended, first[2]]


def test_sampled_answers_depend_on_the_prompt_and_the_seed_alone(target: Target) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 6}
    together = answers(target, batch_size=4, **sampled)
    assert together == answers(target, batch_size=1, **sampled)
    assert together != answers(target, batch_size=4, seed=1, **sampled)


def test_a_prompt_without_room_is_rejected(target: Target) -> None:
    by_key = answers(target, max_new_tokens=2048)  # of 2,048 positions
    assert {type(answer) for answer in by_key.values()} == {Rejection}
