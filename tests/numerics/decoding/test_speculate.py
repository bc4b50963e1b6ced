"""Speculative decoding gives the target's own output and counts what it emitted.

Drafters are random (nearly nothing is accepted) or know the answer (`KnowingContext`), so that every path of
acceptance, of end tokens inside a block and of rows that finish at different times is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dflash_core.decoding import speculate
from dflash_core.decoding.evaluate import evaluate
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_answers, plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target import attention as target_attention
from dflash_core.target.target import Target
from tests.support.decoding_cases import BLOCK, PROMPTS, KnowingContext, make_drafter


@pytest.mark.parametrize("prefill", [1, 10, 8192])
def test_a_row_that_comes_free_takes_the_next_prompt(
    target: Target, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, five prompts whose answers end at different times: each as if alone, yielded as it ends."""
    monkeypatch.setattr(speculate, "MAX_PREFILL_TOKENS", prefill)  # one prompt at a time, or as many as fit
    whole = plain_decode(target, PROMPTS, Sampling(max_new_tokens=20)).generations
    ends = tuple(g.token_ids[place] for g, place in zip(whole[:3], (2, 9, 5)))
    monkeypatch.setattr(target, "eos_ids", ends)
    expected = []
    for generation in whole:
        cut = next((i + 1 for i, token in enumerate(generation.token_ids) if token in ends), 20)
        expected.append(generation.token_ids[:cut])
    assert len({len(answer) for answer in expected}) > 2
    yielded = list(plain_answers(target, PROMPTS, Sampling(max_new_tokens=20, batch_size=2)))
    assert {i: g.token_ids for i, g in yielded} == dict(enumerate(expected))
    first_two = sorted((0, 1), key=lambda i: len(expected[i]))
    assert yielded[0][0] == first_two[0]


def test_a_prompt_with_tokens_that_the_target_lacks_is_rejected(
    target: Target, drafter: DFlashDrafter
) -> None:
    size = target.embed_weight.shape[0]
    prompts = [*PROMPTS, Prompt(token_ids=(1, size))]
    message = f"prompt {len(prompts)}: token id {size}; allowed by the target's embedding: 0 to {size - 1}"
    with pytest.raises(UserError, match=message):
        plain_decode(target, prompts, Sampling(max_new_tokens=2))
    with pytest.raises(UserError, match=message):
        speculative_decode(target, drafter, prompts, Sampling(max_new_tokens=2))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_plain_decoding_is_what_transformers_generates(
    target: Target, tiny_target_dir: Path, batch_size: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    decoded = plain_decode(target, PROMPTS, Sampling(max_new_tokens=12, batch_size=batch_size))
    for prompt, generation in zip(PROMPTS, decoded.generations):
        ids = torch.tensor([prompt.token_ids])
        mask = torch.ones_like(ids)
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=2)
        assert generation.token_ids == theirs[0, ids.shape[1] :].tolist()
        assert generation.finished == "length"


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_output_is_the_targets_own_with_a_random_drafter(
    target: Target, drafter: DFlashDrafter, batch_size: int
) -> None:
    evaluation = evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=20, batch_size=batch_size))
    assert evaluation.lossless is True
    assert evaluation.divergences == []
    assert [len(g.token_ids) for g in evaluation.speculative.generations] == [20] * 5
    alone = [plain_decode(target, [p], Sampling(max_new_tokens=20)).generations[0] for p in PROMPTS]
    assert [g.token_ids for g in evaluation.plain.generations] == [
        g.token_ids for g in alone
    ]  # in their order


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_each_step_emits_the_right_drafts_and_one_more(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], right: int, batch_size: int
) -> None:
    knowing.right = right
    decoded = speculative_decode(target, drafter, PROMPTS, Sampling(max_new_tokens=13, batch_size=batch_size))
    for answer, generation in zip(knowing.answers, decoded.generations):
        assert generation.token_ids == answer[:13]
        assert sum(generation.emitted) == 12  # the first token came from the prefill
        whole = 12 // (right + 1)
        assert generation.emitted[:whole] == [right + 1] * whole
        assert generation.accepted[:whole] == [right] * whole
        room_left = [13 - 1 - sum(generation.emitted[:i]) for i in range(len(generation.emitted))]
        assert generation.drafted == [min(BLOCK - 1, room - 1) for room in room_left]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_an_end_token_inside_a_block_ends_the_answer(
    target: Target,
    drafter: DFlashDrafter,
    knowing: type[KnowingContext],
    batch_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two end ids: the third new token of prompt 0 and the fifth of prompt 1, wherever they occur first."""
    knowing.right = 3
    ends = (knowing.answers[0][2], knowing.answers[1][4])
    monkeypatch.setattr(target, "eos_ids", ends)
    sampling = Sampling(max_new_tokens=30, batch_size=batch_size)
    decoded = speculative_decode(target, drafter, PROMPTS, sampling)
    plain = plain_decode(target, PROMPTS, sampling)
    for answer, generation, alone in zip(knowing.answers, decoded.generations, plain.generations):
        cut = next((i + 1 for i, token in enumerate(answer[:30]) if token in ends), 30)
        assert generation.token_ids == alone.token_ids == answer[:cut]
        assert generation.finished == ("end" if answer[cut - 1] in ends else "length")
        assert sum(generation.emitted) == cut - 1  # nothing after the end is counted
    assert decoded.generations[0].finished == "end"
    assert len(decoded.generations[0].token_ids) <= 3


def test_an_end_token_as_first_token_needs_no_step(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing.right = 3
    monkeypatch.setattr(target, "eos_ids", (knowing.answers[3][0],))
    for batch_size in (1, 5):
        knowing.started = 0
        sampling = Sampling(max_new_tokens=8, batch_size=batch_size)
        generation = speculative_decode(target, drafter, PROMPTS, sampling).generations[3]
        assert (generation.token_ids, generation.emitted) == ([knowing.answers[3][0]], [])


def test_sampling_end_to_end_is_distributed_as_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of eight words, 3,000 answers to one prompt: token frequencies against exact probabilities."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.6,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    target_attention.register()
    model.set_attn_implementation(target_attention.ATTENTION_NAME)
    small = Target(model, [0], compute_dtype=torch.float32, feature_dtype=torch.float32)
    drafter = make_drafter(small, mask_token_id=1, block_size=3, num_layers=1)
    n, prompt = 3000, (3, 5, 2)
    sampling = Sampling(max_new_tokens=3, temperature=0.8, batch_size=1000, seed=4)
    decoded = speculative_decode(small, drafter, [Prompt(token_ids=prompt)] * n, sampling)
    tokens = np.array([g.token_ids for g in decoded.generations])
    assert max(max(g.accepted, default=0) for g in decoded.generations) == 2

    def exact(prefix: tuple[int, ...]) -> np.ndarray:
        bounds = np.array([0, len(prefix)], dtype=np.int32)
        last = small.capture(np.array(prefix), bounds, want_last_hidden=True).last_hidden
        assert last is not None
        return torch.softmax(small.logits(last[-1]).double() / 0.8, -1).numpy()

    first = exact(prompt)
    second = np.array([exact((*prompt, a)) for a in range(8)])
    third = np.array([[exact((*prompt, a, b)) for b in range(8)] for a in range(8)])
    joint = first[:, None, None] * second[:, :, None] * third
    for position, expected in enumerate([first, joint.sum((0, 2)), joint.sum((0, 1))]):
        counts = np.bincount(tokens[:, position], minlength=8)
        chi_square = float(((counts - n * expected) ** 2 / (n * expected)).sum())
        assert chi_square < 24.3, (
            f"position {position}: {counts / n} against {expected}"
        )  # 99.9% at 7 degrees


def test_a_sampled_answer_does_not_depend_on_its_batch(target: Target, drafter: DFlashDrafter) -> None:
    def answers(
        prompts: Sequence[Prompt], numbers: list[int] | None = None, **changes: int
    ) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=10, temperature=1.0, **changes)
        decoded = speculative_decode(target, drafter, prompts, sampling, numbers=numbers)
        return [g.token_ids for g in decoded.generations]

    alone = answers(PROMPTS, batch_size=1)
    assert answers(PROMPTS, batch_size=2) == alone
    assert answers(PROMPTS, batch_size=5) == alone
    assert answers(PROMPTS, batch_size=5, seed=1) != alone
    assert answers(PROMPTS[3:], numbers=[3, 4]) == alone[3:]


def test_the_real_target_decodes_as_transformers_generates(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    texts = ["Write a function that adds two numbers.", "Name three colours."]
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    prompts = [Prompt(token_ids=tuple(inputs["input_ids"])) for inputs in encoded]
    real = Target.load(smollm2_dir, layer_ids=[1, 27], compute_dtype="float32")
    drafter = make_drafter(real, num_layers=1)
    evaluation = evaluate(real, drafter, prompts, Sampling(max_new_tokens=6, batch_size=2))
    assert evaluation.lossless is True
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for prompt, generation in zip(prompts, evaluation.speculative.generations):
        ids = torch.tensor([prompt.token_ids])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert generation.token_ids == theirs[0, ids.shape[1] :].tolist()
