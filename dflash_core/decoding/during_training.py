"""The check that offline numbers cannot give: real decoding of a few validation prompts with the drafter as
it is.

An offline accuracy that improves while the decoded acceptance length does not points to a drafter that is
trained otherwise than it is used (rotary settings, layer ids, mask token).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.data.store import TokenStore
from dflash_core.decoding.acceptance import acceptance_interval, acceptance_length
from dflash_core.decoding.speculate import Prompt, Sampling, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.target import Target

NUM_PROMPTS, MAX_NEW_TOKENS = 4, 32  # a few seconds on a CPU


def validation_prompts(store: TokenStore, rows: NDArray[np.int32], num_prompts: int) -> list[Prompt]:
    """What stands before the first answer of the first samples whose answers have something to draft."""
    prompts = []
    for row in rows:
        supervised = np.flatnonzero(store.loss_mask(int(row)))
        if len(supervised) > 1 and supervised[0] > 0:
            tokens = store.token_ids(int(row))[: supervised[0]]
            prompts.append(Prompt(token_ids=tuple(int(t) for t in tokens)))
        if len(prompts) == num_prompts:
            break
    return prompts


def decoder_of(
    target: Target, prompts: list[Prompt], stopped: Callable[[], bool]
) -> Callable[[DFlashDrafter], dict[str, float]]:
    """A function from a drafter to its decoded acceptance length on these prompts, with its interval.

    It decodes nothing, and returns nothing, once `stopped` says so.
    """
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, batch_size=NUM_PROMPTS)

    @torch.no_grad()
    def decode(drafter: DFlashDrafter) -> dict[str, float]:
        if stopped():
            return {}
        generations = speculative_decode(target, drafter, prompts, sampling).generations
        low, high = acceptance_interval(generations, drafter.shape.block_size)
        return {
            "validation/acceptance_length": acceptance_length(generations),
            "validation/acceptance_length_low": low,
            "validation/acceptance_length_high": high,
        }

    return decode
