"""Replay along a given text takes the steps of decoding and judges drafts by that text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_core.decoding.drafter_context import DrafterContext
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.serving.replay import replay
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS, KnowingContext, make_drafter


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_replay_along_the_targets_own_answers_takes_the_steps_of_decoding(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], batch_size: int
) -> None:
    """Two drafts of three right in each step; only a last step may differ, because it counts in full."""
    knowing.right = 2
    given = [answer[:length] for answer, length in zip(knowing.answers, (12, 13, 9, 1, 11))]
    knowing.order = [3, 2, 4, 0, 1]  # replay takes the shortest texts together
    prompts = [prompt.token_ids for prompt in PROMPTS]
    steps = replay(target, drafter, prompts, given, batch_size=batch_size)
    assert steps == [[2] * 4, [2] * 4, [2] * 3, [], [2] * 4]  # 1 + 3 + 3 + 3 of 12, then two drafts more


def test_replay_judges_drafts_by_the_given_text(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that the target would not write, with one of its end tokens inside, is still read to its end."""
    rng = np.random.default_rng(5)
    given = [rng.integers(4, 512, size=10).tolist() for _ in PROMPTS]
    monkeypatch.setattr(target, "eos_ids", (given[0][4],))
    knowing.answers, prompts = given, [prompt.token_ids for prompt in PROMPTS]
    # 1 + 4 + 4 of 10, then the last token and what lies beyond: zeros, which the target rejects.
    knowing.right = 3
    assert replay(target, drafter, prompts, given, batch_size=2) == [[3, 3, 1]] * 5
    knowing.started, knowing.right = 0, 0
    assert replay(target, drafter, prompts, given, batch_size=2) == [[0] * 9] * 5


def test_replay_drafts_what_decoding_drafts(target: Target) -> None:
    """A drafter that predicts by itself: where its drafts are the text, every one is accepted."""
    drafter = make_drafter(target)
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    text = list(PROMPTS[0].token_ids) + [7]  # the first new token belongs to no step
    # Three blocks of what the drafter predicts, a bonus after each.
    while len(text) < len(PROMPTS[0].token_ids) + 13:
        features = target.capture(np.array(text), np.array([0, len(text)], dtype=np.int32)).hidden[:-1]
        context = DrafterContext(drafter, 1, 64, like=target.embed_weight)
        with torch.no_grad():
            context.append(features[None], torch.arange(len(text) - 1)[None])
            last = torch.tensor([text[-1]]), torch.tensor([len(text) - 1])
            text += context.draft_logits(target, *last)[0].argmax(-1).tolist() + [9]
    new = text[len(PROMPTS[0].token_ids) :]
    assert replay(target, drafter, [PROMPTS[0].token_ids], [new]) == [[3, 3, 3]]
    wrong = new.copy()
    # The second draft of the second block; the next block starts from it.
    wrong[6] = (wrong[6] + 1) % 512
    assert replay(target, drafter, [PROMPTS[0].token_ids], [wrong])[0][:2] == [3, 1]
