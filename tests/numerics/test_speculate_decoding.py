"""Speculative decoding gives the target's own output, and counts what it emitted.

The drafters here are random (nearly nothing accepted) or know the answer (`KnowingContext`: so many drafts
right a step), so each path of acceptance, of end tokens inside a block and of rows that finish apart is
walked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.support.tiny_target import MASK_TOKEN_ID
from dflash_core.config import DrafterConfig, ObjectiveConfig
from dflash_core.decoding import speculate
from dflash_core.decoding.evaluate import evaluate
from dflash_core.decoding.speculate import (
    DrafterContext,
    Prompt,
    Sampling,
    accept_greedy,
    accept_sampled,
    plain_answers,
    plain_decode,
    speculative_decode,
)
from dflash_core.drafter.drafter import DFlashDrafter, drafter_shape
from dflash_core.errors import UserError
from dflash_core.microbatch import Features, Microbatch
from dflash_core.objective.loss import LossSettings, TargetEnds, microbatch_loss
from dflash_core.serving import replay as replaying
from dflash_core.serving.replay import replay
from dflash_core.target.target import Target

BLOCK = 4
PROMPTS = [
    Prompt(token_ids=tuple(np.random.default_rng(i).integers(4, 512, size=length)), prompt_set="ab"[i % 2])
    for i, length in enumerate([9, 3, 14, 6, 1])
]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    loaded = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
    loaded.eos_ids = ()
    return loaded


def make_drafter(target: Target, **config: Any) -> DFlashDrafter:
    settings = {"num_layers": 2, "block_size": BLOCK, "mask_token_id": MASK_TOKEN_ID} | config
    return DFlashDrafter(drafter_shape(target.config, DrafterConfig(**settings), target.layer_ids))


@pytest.fixture(scope="module")
def drafter(target: Target) -> DFlashDrafter:
    return make_drafter(target)


class KnowingContext(DrafterContext):
    """Drafts the first `right` tokens of each block from the known answers, and a wrong token after them."""

    answers: Sequence[Sequence[int]]
    right: int
    order: Sequence[int]  # in which prompts are decoded
    started = 0

    def append(
        self, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        super().append(features, positions, rows)
        if rows is not None:  # prompts that come in, in new rows behind those that are there
            self.prompts = getattr(self, "prompts", [])
            new = int(rows[-1]) + 1 - len(self.prompts)
            self.prompts += self.order[KnowingContext.started : KnowingContext.started + new]
            KnowingContext.started += new

    def keep_rows(self, rows: torch.Tensor) -> None:
        super().keep_rows(rows)
        self.prompts = [self.prompts[i] for i in rows.tolist()]

    def draft_logits(
        self, target: Target, anchor_tokens_B: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        real = super().draft_logits(target, anchor_tokens_B, lengths_B)
        logits = torch.zeros_like(real)
        for row, (prompt, length) in enumerate(zip(self.prompts, lengths_B.tolist())):
            answer = self.answers[prompt][length - len(PROMPTS[prompt].token_ids) + 1 :]
            for slot in range(real.shape[1]):
                known = answer[slot] if slot < len(answer) else 0
                logits[row, slot, known if slot < self.right else (known + 1) % 512] = 1.0
        return logits


@pytest.fixture
def knowing(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[KnowingContext]]:
    long = plain_decode(target, PROMPTS, Sampling(max_new_tokens=40, batch_size=5))
    KnowingContext.answers = [g.token_ids for g in long.generations]
    KnowingContext.started, KnowingContext.order = 0, range(len(PROMPTS))
    for module in (speculate, replaying):
        monkeypatch.setattr(module, "DrafterContext", KnowingContext)
    yield KnowingContext


@pytest.mark.parametrize("prefill", [1, 10, 8192])
def test_a_row_that_comes_free_takes_the_next_prompt(
    target: Target, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows, five prompts whose answers end apart: each as if alone, told in the order in which they end."""
    monkeypatch.setattr(speculate, "MAX_PREFILL_TOKENS", prefill)  # one prompt at a time, or as many as fit
    whole = plain_decode(target, PROMPTS, Sampling(max_new_tokens=20)).generations
    ends = tuple(g.token_ids[place] for g, place in zip(whole[:3], (2, 9, 5)))
    monkeypatch.setattr(target, "eos_ids", ends)
    expected = []
    for generation in whole:
        cut = next((i + 1 for i, token in enumerate(generation.token_ids) if token in ends), 20)
        expected.append(generation.token_ids[:cut])
    assert len({len(answer) for answer in expected}) > 2
    told = list(plain_answers(target, PROMPTS, Sampling(max_new_tokens=20, batch_size=2)))
    assert {i: g.token_ids for i, g in told} == dict(enumerate(expected))
    first_two = sorted((0, 1), key=lambda i: len(expected[i]))
    assert told[0][0] == first_two[0]


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
    found = evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=20, batch_size=batch_size))
    assert found.lossless is True
    assert found.differences == []
    assert [len(g.token_ids) for g in found.speculative.generations] == [20] * 5
    alone = [plain_decode(target, [p], Sampling(max_new_tokens=20)).generations[0] for p in PROMPTS]
    assert [g.token_ids for g in found.plain.generations] == [g.token_ids for g in alone]  # in their order


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
    """Two end ids: the third new token of prompt 0 and the fifth of prompt 1, wherever they show up first."""
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
        assert sum(generation.emitted) == cut - 1  # nothing behind the end is counted
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


def test_accept_greedy_by_hand() -> None:
    drafts = torch.tensor([[5, 7, 9], [1, 7, 4], [5, 7, 4]])
    accepted, bonus = accept_greedy(drafts, torch.tensor([[5, 7, 4, 8]] * 3))
    assert accepted.tolist() == [2, 0, 3]
    assert bonus.tolist() == [4, 5, 8]


def test_sampled_acceptance_keeps_the_targets_distribution() -> None:
    """Three tokens of a five-word Markov chain; each emitted token is distributed as the chain says."""
    rng = np.random.default_rng(0)
    chain = torch.tensor(rng.dirichlet(np.full(5, 0.7), size=5))  # next word given the last
    draft = torch.tensor(rng.dirichlet(np.full(5, 0.7), size=2))  # slots drafted without knowing each other
    n = 200_000
    drafts = torch.stack([torch.tensor(rng.choice(5, size=n, p=q / q.sum())) for q in draft.numpy()], dim=1)
    target_probs = torch.stack([chain[0].expand(n, 5), chain[drafts[:, 0]], chain[drafts[:, 1]]], dim=1)
    accepted, bonus = accept_sampled(
        drafts, draft.expand(n, 2, 5), target_probs, torch.tensor(rng.random((n, 3)))
    )
    tokens = torch.cat([drafts, torch.zeros(n, 1, dtype=torch.int64)], dim=1)
    tokens[torch.arange(n), accepted] = bonus
    first = torch.bincount(tokens[:, 0], minlength=5) / n
    torch.testing.assert_close(first, chain[0].float(), atol=0.005, rtol=0)
    checked = 0
    for slot in (1, 2):
        for word in range(5):
            told = tokens[(accepted >= slot) & (tokens[:, slot - 1] == word), slot]
            if len(told) > 3000:
                share = torch.bincount(told, minlength=5) / len(told)
                torch.testing.assert_close(share, chain[word].float(), atol=0.035, rtol=0)
                checked += 1
    assert checked >= 5
    # the chance of acceptance is the overlap of the two distributions
    overlap = float(torch.minimum(chain[0], draft[0]).sum())
    assert abs(float((accepted > 0).double().mean()) - overlap) < 0.005


def test_sampling_end_to_end_is_distributed_as_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of eight words, 3,000 answers to one prompt: token frequencies against exact probabilities."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            initializer_range=0.6, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    from dflash_core.target import attention as target_attention

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
        found = np.bincount(tokens[:, position], minlength=8)
        chi_square = float(((found - n * expected) ** 2 / (n * expected)).sum())
        assert chi_square < 24.3, f"position {position}: {found / n} against {expected}"  # 99.9% at 7 degrees


def test_a_sampled_answer_does_not_depend_on_its_batch(target: Target, drafter: DFlashDrafter) -> None:
    answers = [
        [
            g.token_ids
            for g in speculative_decode(
                target, drafter, PROMPTS, Sampling(max_new_tokens=10, temperature=1.0, batch_size=size)
            ).generations
        ]
        for size in (1, 2, 5)
    ]
    assert answers[0] == answers[1] == answers[2]
    other = Sampling(max_new_tokens=10, temperature=1.0, batch_size=5, seed=1)
    assert answers[0] != [
        g.token_ids for g in speculative_decode(target, drafter, PROMPTS, other).generations
    ]
    part = speculative_decode(
        target, drafter, PROMPTS[3:], Sampling(max_new_tokens=10, temperature=1.0), numbers=[3, 4]
    )
    assert [g.token_ids for g in part.generations] == answers[0][3:]


@pytest.mark.parametrize("window", [None, 6])
def test_the_draft_step_is_the_training_forward(target: Target, window: int | None) -> None:
    """At each anchor of two packed samples: logits of decoding over the prefix equal those of training."""
    drafter = make_drafter(target, sliding_window=window)
    lengths = [17, 12]
    tokens = np.random.default_rng(1).integers(4, 512, size=sum(lengths))
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    features = target.capture(tokens, bounds).hidden
    row_T = np.arange(29) - np.repeat(bounds[:-1], lengths)
    anchors = np.array([0, 1, 5, 14, 17, 20, 27])
    starts = bounds[np.searchsorted(bounds, anchors, side="right") - 1]
    with torch.no_grad():
        context = drafter.project_layers(drafter.project_context(features), torch.as_tensor(row_T))
        ids = torch.full((len(anchors), BLOCK), MASK_TOKEN_ID)
        ids[:, 0] = torch.as_tensor(tokens[anchors])
        hidden = drafter.forward_blocks(
            target.embed_weight[ids],
            context,
            context_start_A=torch.as_tensor(starts).int(),
            anchor_A=torch.as_tensor(anchors).int(),
        )
        training = target.logits(hidden[:, 1:])
        for i, (anchor, start) in enumerate(zip(anchors.tolist(), starts.tolist())):
            # as decoding does it: the prefix arrives in pieces, and rejected slots lie behind it
            prefix = features[start:anchor][None]
            decoding = DrafterContext(drafter, 1, 40, like=target.embed_weight)
            cut = prefix.shape[1] // 2
            decoding.append(prefix[:, :cut], torch.arange(cut)[None])
            decoding.append(torch.randn(1, 20, features.shape[1]), torch.arange(cut, cut + 20)[None])
            decoding.append(prefix[:, cut:], torch.arange(cut, prefix.shape[1])[None])
            length = torch.tensor([anchor - start])
            logits = decoding.draft_logits(target, torch.as_tensor(tokens[anchor : anchor + 1]), length)
            torch.testing.assert_close(logits[0], training[i], rtol=1e-5, atol=1e-5)


def test_accuracy_by_position_is_the_training_metric(target: Target, drafter: DFlashDrafter) -> None:
    """Draft steps at each anchor of a sample, answers forced: as often right as the training metric says."""
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():  # larger weights, so that predictions differ between positions
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    length = 60
    tokens = torch.as_tensor(np.random.default_rng(2).integers(4, 512, size=length))
    bounds = torch.tensor([0, length], dtype=torch.int32)
    features = target.capture(tokens, bounds).hidden
    anchors = torch.arange(5, 55)
    context = DrafterContext(drafter, 1, length, like=target.embed_weight)
    with torch.no_grad():
        context.append(features[None], torch.arange(length)[None])
        predictions = [
            context.draft_logits(target, tokens[anchor][None], anchor[None])[0].argmax(-1)
            for anchor in anchors
        ]
    # half of the labels are what the drafter says, the rest are the data: otherwise chance alone would be
    # right
    labels = tokens.clone()
    labels[6:36] = torch.stack(predictions)[:30, 0]
    rows = anchors[:, None] + torch.arange(1, BLOCK)
    right = (torch.stack(predictions) == labels[rows]).sum(0)
    microbatch = Microbatch(
        sample_rows=np.zeros(1, dtype=np.int32),
        token_ids=tokens.numpy(),
        loss_mask=np.ones(length, dtype=np.uint8),
        cu_seqlens=np.array([0, length], dtype=np.int32),
        width=0,
        anchors=anchors.int().numpy(),
        anchor_sample=np.zeros(len(anchors), dtype=np.int32),
    )
    settings = LossSettings(
        ends=TargetEnds(target.embed_weight, target.head_weight),
        objective=ObjectiveConfig(labels="target"),
        mask_token_id=MASK_TOKEN_ID,
        max_draft_slots=64,
        device=torch.device("cpu"),
    )
    sums = microbatch_loss(drafter, microbatch, Features(features, labels), settings, backward=False)
    assert sums.correct_K[1:].tolist() == right.tolist()
    assert sums.count_K[1:].tolist() == [50, 50, 50]
    assert int(right[0]) >= 30


def test_bfloat16_differs_at_near_ties_alone(tiny_target_dir: Path) -> None:
    narrow = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="bfloat16")
    narrow.eos_ids = ()
    found = evaluate(narrow, make_drafter(narrow), PROMPTS, Sampling(max_new_tokens=24, batch_size=5))
    report = found.report()
    assert report["lossless"] is True
    assert report["prompts_equal"] + report["near_ties"] == 5
    assert report["compute_dtype"] == "bfloat16"


def test_a_drafter_of_other_layers_is_refused(tiny_target_dir: Path, drafter: DFlashDrafter) -> None:
    """Layer ids off by one load cleanly elsewhere and draft nothing."""
    shifted = Target.load(tiny_target_dir, layer_ids=[1, 3], compute_dtype="float32")
    with pytest.raises(UserError, match=r"target_layer_ids is \[0, 2\], the target has \[1, 3\]"):
        speculative_decode(shifted, drafter, PROMPTS, Sampling(max_new_tokens=2))


def test_prompts_that_cannot_be_decoded_are_refused(target: Target, drafter: DFlashDrafter) -> None:
    for wrong in ([], [Prompt(token_ids=())]):
        with pytest.raises(UserError, match="evaluation.prompts"):
            evaluate(target, drafter, wrong, Sampling(max_new_tokens=2))
    with pytest.raises(
        UserError, match="evaluation.max_new_tokens: 2048 after a prompt of 14 tokens.*2048 positions"
    ):
        evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=2048))


def test_the_report_holds_sets_and_one_record_a_prompt(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext]
) -> None:
    knowing.right = 1
    knowing.order = [0, 4, 1, 3, 0, 2]  # the warm-up decodes the first prompt, then all come by length
    found = evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=9, batch_size=5))
    report = found.report()
    assert report["acceptance_length"] == 2.0  # 8 tokens in 4 steps for each prompt
    assert report["acceptance_interval"] == [2.0, 2.0]
    assert report["steps"] == 20
    assert report["accepted_by_position"] == [20, 0, 0]
    assert report["drafted_by_position"] == [20, 15, 15]
    assert {name: found["prompts"] for name, found in report["sets"].items()} == {"a": 3, "b": 2}
    assert report["lossless"] is True
    records = found.records()
    assert [r["prompt_tokens"] for r in records] == [9, 3, 14, 6, 1]
    assert records[0]["token_ids"] == knowing.answers[0][:9]
    assert records[0]["emitted"] == [2, 2, 2, 2]


def test_the_real_target_decodes_as_transformers_generates(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    texts = ["Write a function that adds two numbers.", "Name three colours."]
    prompts = [
        Prompt(
            token_ids=tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True
                )["input_ids"]
            )
        )
        for text in texts
    ]
    real = Target.load(smollm2_dir, layer_ids=[1, 27], compute_dtype="float32")
    drafter = make_drafter(real, num_layers=1)
    found = evaluate(real, drafter, prompts, Sampling(max_new_tokens=6, batch_size=2))
    assert found.lossless is True
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for prompt, generation in zip(prompts, found.speculative.generations):
        ids = torch.tensor([prompt.token_ids])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert generation.token_ids == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_replay_along_the_targets_own_answers_takes_the_steps_of_decoding(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], batch_size: int
) -> None:
    """Two drafts of three right in each step; only a last step may differ, for it counts in full."""
    knowing.right = 2
    given = [answer[:length] for answer, length in zip(knowing.answers, (12, 13, 9, 1, 11))]
    knowing.order = [3, 2, 4, 0, 1]  # replay takes the shortest texts together
    prompts = [prompt.token_ids for prompt in PROMPTS]
    found = replay(target, drafter, prompts, given, batch_size=batch_size)
    assert found == [[2] * 4, [2] * 4, [2] * 3, [], [2] * 4]  # 1 + 3 + 3 + 3 of 12, then two drafts more


def test_replay_judges_drafts_by_the_given_text(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that the target would not write, with one of its end tokens inside: read to its end, all the same."""
    rng = np.random.default_rng(5)
    given = [rng.integers(4, 512, size=10).tolist() for _ in PROMPTS]
    monkeypatch.setattr(target, "eos_ids", (given[0][4],))
    knowing.answers, prompts = given, [prompt.token_ids for prompt in PROMPTS]
    knowing.right = (
        3  # 1 + 4 + 4 of 10, then the last token and what lies beyond: zeros, which the target refuses
    )
    assert replay(target, drafter, prompts, given, batch_size=2) == [[3, 3, 1]] * 5
    knowing.started, knowing.right = 0, 0
    assert replay(target, drafter, prompts, given, batch_size=2) == [[0] * 9] * 5


def test_replay_drafts_what_decoding_drafts(target: Target) -> None:
    """A drafter with opinions of its own, no oracle: where its drafts are the text, every one is accepted."""
    drafter = make_drafter(target)
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    text = list(PROMPTS[0].token_ids) + [7]  # the first new token belongs to no step
    while (
        len(text) < len(PROMPTS[0].token_ids) + 13
    ):  # three blocks of what the drafter says, a bonus after each
        features = target.capture(np.array(text), np.array([0, len(text)], dtype=np.int32)).hidden[:-1]
        context = DrafterContext(drafter, 1, 64, like=target.embed_weight)
        with torch.no_grad():
            context.append(features[None], torch.arange(len(text) - 1)[None])
            last = torch.tensor([text[-1]]), torch.tensor([len(text) - 1])
            text += context.draft_logits(target, *last)[0].argmax(-1).tolist() + [9]
    new = text[len(PROMPTS[0].token_ids) :]
    assert replay(target, drafter, [PROMPTS[0].token_ids], [new]) == [[3, 3, 3]]
    wrong = new.copy()
    wrong[6] = (wrong[6] + 1) % 512  # the second draft of the second block; what follows starts from it
    assert replay(target, drafter, [PROMPTS[0].token_ids], [wrong])[0][:2] == [3, 1]
