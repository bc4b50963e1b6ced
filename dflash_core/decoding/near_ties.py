"""Where greedy outputs differ: how nearly the target's two best tokens were tied there.

Asked for after decoding, for the differing tokens alone, so that no decoder pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_core.decoding.acceptance import bfloat16_steps
from dflash_core.target.target import Target


@torch.inference_mode()
def plain_margin(target: Target, prompt: Sequence[int], answer: Sequence[int], position: int) -> float:
    """Return the gap of the two best logits for new token `position` of a plain answer, in bfloat16 steps.

    The tokens before it are read one at a time, as plain decoding read them: a forward over all of them
    rounds differently.
    """
    device = target.device
    cache = target.new_cache(1, len(prompt) + max(position, 1))
    states, *_ = target.prefill(
        torch.tensor(list(prompt), device=device), torch.tensor([0, len(prompt)]), cache
    )
    for i, token in enumerate(answer[:position]):
        ids, at = (torch.tensor([[number]], device=device) for number in (token, len(prompt) + i))
        states = target.decode(ids, cache, at)[0][0]
    best, second = target.logits(states[-1]).float().topk(2).values.cpu().numpy()
    return float(bfloat16_steps(best, second))
