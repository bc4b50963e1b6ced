"""Real decoding of a few validation prompts during training, with the drafter as it is at that step.

It checks what offline figures cannot: an accuracy that improves while the decoded acceptance length does not
means that training and decoding do not match (rotary settings, layer ids, mask token). Price: a few seconds
on a CPU per call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.config import RunConfig
from dflash_core.data.chat import load_tokenizer
from dflash_core.data.store import TokenStore
from dflash_core.decoding.acceptance import acceptance_interval
from dflash_core.decoding.prompt_sets import validation_prompts
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target

NUM_PROMPTS = 4
MAX_NEW_TOKENS = 32


def draftable_prompts(store: TokenStore, rows: NDArray[np.int32]) -> list[Prompt]:
    """Return the prompts of the first validation samples whose answer is long enough to draft."""
    return validation_prompts(store, rows, NUM_PROMPTS, min_supervised_tokens=2)


def end_answers(target: Target, directory: Path | str, config: RunConfig) -> None:
    """Let the target's answers end where an evaluation ends them (`Target.end_answers`).

    A training reads neither tokenizer nor chat template otherwise. Without them it reports that, and answers
    end at the tokens of the target's configs alone.
    """
    try:
        tokenizer = load_tokenizer(str(directory), trust_remote_code=config.target.trust_remote_code)
        target.end_answers(tokenizer, config.data)
    except (UserError, OSError, ValueError, KeyError) as error:
        print(f"decoding during training: answers end at {target.eos_ids} alone: {error}", flush=True)


def decoder_of(
    target: Target, prompts: list[Prompt], stopped: Callable[[], bool]
) -> Callable[[DFlashDrafter], dict[str, float]]:
    """Return a function from a drafter to its decoded acceptance length on these prompts, with its interval.

    It decodes nothing and returns an empty dict once `stopped` returns True.

    Args:
        target: the loaded target, after `Target.end_answers`.
        prompts: at least one.
        stopped: returns True when the run is to stop.
    """
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, batch_size=NUM_PROMPTS)

    @torch.no_grad()
    def decode(drafter: DFlashDrafter) -> dict[str, float]:
        if stopped():
            return {}
        generations = speculative_decode(target, drafter, prompts, sampling).generations
        length = acceptance_interval(generations, drafter.shape.block_size)
        return {
            "validation/acceptance_length": length.mean,
            "validation/acceptance_length_low": length.low,
            "validation/acceptance_length_high": length.high,
        }

    return decode
