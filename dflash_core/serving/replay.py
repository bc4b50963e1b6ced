"""The evaluator's side of the serve check: the drafter's accuracy along texts that a serving engine wrote.

The steps are those of speculative decoding (`decoding/speculate.py`), with one difference: every draft is
judged by the token that the text has at its position, so nothing depends on what the target would have chosen
here, at a near tie or in another dtype. The target reads a whole text in one pass, and drafts come from the
evaluator's own `DrafterContext`, which sees only what lies before the anchor.

A last step counts in full, as it does in an engine's metrics: drafts beyond the end of the text are judged by
the target itself, where the drafts before them were right.

Shape letters: B rows, K block size, k = K - 1 drafts, M positions, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_core.decoding.acceptance import Divergence, Generation, bfloat16_steps, find_divergences
from dflash_core.decoding.drafter_context import DrafterContext, check_pair
from dflash_core.decoding.sampling import accept_greedy
from dflash_core.decoding.speculate import remaining_rows
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.serving import agreement
from dflash_core.serving.agreement import StepCounts
from dflash_core.serving.check import Answer, check_trace, engine_counts
from dflash_core.target.target import Target


def compare_with_replay(
    target: Target, drafter: DFlashDrafter, prompts: Sequence[list[int]], answer: Answer, *, batch_size: int
) -> dict[str, Any]:
    """Replay the engine's output with our evaluator and compare both; returns JSON types.

    Args:
        prompts: at least as many as the answer has texts.
    """
    check_trace(answer)
    texts = answer["token_ids"]
    steps = replay(target, drafter, prompts[: len(texts)], texts, batch_size=batch_size)
    evaluator = StepCounts.of_steps(
        [count for by_step in steps for count in by_step], drafter.shape.block_size
    )
    comparison = agreement.compare_counts(engine_counts(answer), evaluator)
    same_start = agreement.compare_steps(
        [emitted[1:] for emitted in answer["emitted"]],
        [[count + 1 for count in by_step] for by_step in steps],
    )
    steps_agree = agreement.steps_agree(same_start)
    return {
        **comparison,
        "steps_from_the_same_token": same_start,
        "steps_agree": steps_agree,
        "agrees": comparison["agrees"] and steps_agree,
    }


def engine_divergences(
    target: Target, prompts: Sequence[list[int]], plain: Answer, speculative: Answer
) -> list[dict[str, Any]]:
    """Return the first difference of each prompt's engine outputs, without and with the drafter.

    `margin_steps` is the gap of the target's two best logits there in bfloat16 steps, by our own forward
    pass.
    """
    without, with_drafter = (
        [Generation(token_ids=ids) for ids in answer["token_ids"]] for answer in (plain, speculative)
    )
    divergences = []
    for divergence in find_divergences(without, with_drafter):
        prompt, position = divergence.prompt, divergence.position
        tokens = np.array([*prompts[prompt], *plain["token_ids"][prompt][:position]])
        captured = target.capture(tokens, np.array([0, len(tokens)], dtype=np.int32), want_last_hidden=True)
        assert captured.last_hidden is not None
        best = target.logits(captured.last_hidden[-1]).float().topk(2).values.tolist()
        margin = float(bfloat16_steps(np.array(best[0]), np.array(best[1])))
        divergences.append(Divergence(prompt, position, margin).as_dict())
    return divergences


@torch.inference_mode()
def replay(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    batch_size: int = 1,
) -> list[list[int]]:
    """Return the number of accepted drafts of each step, by prompt; a step emits one token more.

    Args:
        prompts: token ids, at least one each.
        continuations: new tokens, at least one each. The first belongs to no step: a prefill yields it.
        batch_size: texts replayed at the same time.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    check_pair(target, drafter)
    assert len(prompts) == len(continuations), "one continuation per prompt"
    assert all(continuations), "an empty continuation"
    # By length, so that the rows of a batch end at about the same time.
    order = sorted(range(len(prompts)), key=lambda i: len(continuations[i]))
    accepted: dict[int, list[int]] = {}
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        steps = _replay_batch(
            target, drafter, [prompts[i] for i in numbers], [continuations[i] for i in numbers]
        )
        accepted |= zip(numbers, steps)
    return [accepted[i] for i in range(len(prompts))]


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
    cache = target.new_cache(len(texts), num_slots)
    context = DrafterContext(drafter, len(texts), num_slots, like=target.embed_weight)
    packed = torch.tensor([token for text in texts for token in text], device=device)
    _, features, rows_T, positions_T = target.prefill(packed, bounds, cache)
    context.append(features, positions_T, rows_T)
    padded = np.full((len(texts), num_slots + 1), -1, dtype=np.int64)  # -1 beyond the end
    for row, tokens in zip(padded, texts):
        row[: len(tokens)] = tokens
    text_BM = torch.as_tensor(padded, device=device)
    # Positions of the anchors and of the last tokens.
    anchor_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    last_B = bounds.diff().to(device) - 1
    slots_K = torch.arange(block_size, device=device)
    steps: list[list[int]] = [[] for _ in texts]
    live = list(range(len(texts)))
    while True:
        rows = remaining_rows((anchor_B < last_B).tolist())
        if len(rows) < len(live):
            live = [live[row] for row in rows]
            remaining = torch.tensor(rows, dtype=torch.int64, device=device)
            anchor_B, last_B, text_BM = anchor_B[remaining], last_B[remaining], text_BM[remaining]
            cache.keep_rows(remaining)
            context.keep_rows(remaining)
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
