"""Prompts, random drafters, and `KnowingContext`, a drafter that knows the answers.

A `conftest.py` that imports `target`, `drafter` and `knowing` from here offers them as fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.support.tiny_target import MASK_TOKEN_ID
from dflash_core.config import DrafterConfig
from dflash_core.decoding import speculate
from dflash_core.decoding.drafter_context import DrafterContext
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.shape import drafter_shape
from dflash_core.serving import replay as replaying
from dflash_core.target.shape import read_shape
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
    return DFlashDrafter(
        drafter_shape(read_shape(target.config), DrafterConfig(**settings), target.layer_ids)
    )


@pytest.fixture(scope="module")
def drafter(target: Target) -> DFlashDrafter:
    return make_drafter(target)


class KnowingContext(DrafterContext):
    """A context that drafts the first `right` tokens of each block from the answers, then a wrong token."""

    answers: Sequence[Sequence[int]]
    right: int
    # In which prompts are decoded.
    order: Sequence[int]
    started = 0

    def append(
        self, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        super().append(features, positions, rows)
        # Packed features are those of new prompts, in new rows after the live ones.
        if rows is not None:
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
