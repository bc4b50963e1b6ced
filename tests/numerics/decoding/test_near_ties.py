"""The margin of a plain token, read again for differences alone."""

from __future__ import annotations

import pytest
import torch

from dflash_core.decoding.acceptance import bfloat16_steps
from dflash_core.decoding.near_ties import plain_margin
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import plain_decode
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS


def test_the_margin_is_that_of_the_logits_that_plain_decoding_chose_from(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = target.logits, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(own(hidden))
        return seen[-1]

    monkeypatch.setattr(target, "logits", logits)
    answer = plain_decode(target, PROMPTS[:1], Sampling(max_new_tokens=6)).generations[0].token_ids
    assert len(seen) == 6
    for position, chosen_from in enumerate(seen[:6]):
        best, second = chosen_from[0].topk(2).values.numpy()
        margin = plain_margin(target, PROMPTS[0].token_ids, answer, position)
        assert margin == float(bfloat16_steps(best, second))
