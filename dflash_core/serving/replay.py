"""How often a drafter is right along a text that is given: what a serving engine has written, for instance.

The steps are those of speculative decoding (`speculate.py`), with one difference: every draft is judged by the token
that the text has at its position, so nothing depends on what the target would have chosen here, at a near tie or in
another dtype. The target reads a whole text in one pass, and drafts come from the evaluator's own `DrafterContext`,
which sees what lies before the anchor alone.

A last step counts in full, as it does in an engine's metrics: drafts beyond the end of the text are judged by the
target itself, where the drafts before them were right.

Shape letters: B rows, K block size, k = K - 1 drafts, M positions, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash_core.decoding.speculate import DrafterContext, accept_greedy, check_pair, rows_that_go_on
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.decode_cache import DecodeCache
from dflash_core.target.target import Target


@torch.inference_mode()
def replay(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
) -> list[list[int]]:
    """Accepted drafts of each step, by prompt; a step emits one token more.

    Args:
        prompts: token ids, at least one each.
        continuations: new tokens, at least one each. The first belongs to no step: a prefill yields it.
        batch_size: texts in work at a time.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    check_pair(target, drafter)
    assert len(prompts) == len(continuations) and all(continuations), "a continuation for each prompt"
    order = sorted(range(len(prompts)), key=lambda i: len(continuations[i]))  # rows that end together
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        steps = _replay_batch(
            target, drafter, [prompts[i] for i in numbers], [continuations[i] for i in numbers]
        )
        found |= zip(numbers, steps)
    return [found[i] for i in range(len(prompts))]


def _replay_batch(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[list[int]]:
    block_size, device = drafter.shape.block_size, target.device
    texts = [[*prompt, *continuation] for prompt, continuation in zip(prompts, continuations)]
    bounds = torch.tensor([0, *map(len, texts)]).cumsum(0)
    num_slots = max(map(len, texts)) + block_size
    cache = DecodeCache(len(texts), num_slots)
    context = DrafterContext(drafter, len(texts), num_slots, like=target.embed_weight)
    packed = torch.tensor([token for text in texts for token in text], device=device)
    _, features, rows_T, positions_T = target.prefill(packed, bounds, cache)
    context.append(features, positions_T, rows_T)
    text = np.full((len(texts), num_slots + 1), -1, dtype=np.int64)  # -1 beyond the end
    for row, tokens in zip(text, texts):
        row[: len(tokens)] = tokens
    text_BM = torch.as_tensor(text, device=device)
    anchor_B = torch.tensor([len(prompt) for prompt in prompts], device=device)  # positions
    last_B = bounds.diff().to(device) - 1
    slots_K = torch.arange(block_size, device=device)
    steps: list[list[int]] = [[] for _ in texts]
    live = list(range(len(texts)))
    while True:
        rows = rows_that_go_on((anchor_B < last_B).tolist())
        if len(rows) < len(live):
            live = [live[row] for row in rows]
            kept = torch.tensor(rows, dtype=torch.int64, device=device)
            anchor_B, last_B, text_BM = anchor_B[kept], last_B[kept], text_BM[kept]
            cache.keep_rows(kept)
            context.keep_rows(kept)
        if not live:
            return steps
        positions_BK = anchor_B[:, None] + slots_K
        anchors_B1 = text_BM.gather(1, anchor_B[:, None])
        drafts_Bk = context.draft_logits(target, anchors_B1[:, 0], anchor_B).argmax(-1)
        own_BK = text_BM.gather(1, positions_BK + 1)
        beyond_Bk = own_BK[:, :-1] < 0
        reached_Bk = (beyond_Bk | (drafts_Bk == own_BK[:, :-1])).long().cumprod(1).bool()
        if (reached_Bk & beyond_Bk).any():
            block_BK = torch.cat([anchors_B1, drafts_Bk], dim=1)
            hidden_BKD, _ = target.decode(block_BK, cache, positions_BK)
            own_BK = torch.where(own_BK < 0, target.logits(hidden_BKD).argmax(-1), own_BK)
        accepted_B, _ = accept_greedy(drafts_Bk, own_BK)
        for i, count in zip(live, accepted_B.tolist()):
            steps[i].append(count)
        anchor_B = anchor_B + accepted_B + 1
