"""Speculative decoding with a DFlash drafter, and plain decoding as its baseline.

A step of a row whose first n positions are known to both models, with the token of position n (the anchor)
chosen and not yet read by the target:

    draft     the drafter fills slots 1..K-1 of [anchor, MASK, ...] at positions n..n+K-1, context 0..n-1
    verify    the target reads [anchor, drafts] at the same positions over its cache
    accept    a leading run of drafts, and one token of the target after them, the bonus (`sampling.py`)

The output is the target's own, whatever the drafter proposes. Rows advance at their own pace: both caches are
addressed by position, and what a row rejected is overwritten before anything reads it. Each prompt has its
own random stream, so an answer does not depend on the batch it is in.

Shape letters: B rows, K block size, k = K - 1 drafts, T packed prompt tokens, D width, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_core.decoding.acceptance import Generation
from dflash_core.decoding.drafter_context import DrafterContext, check_pair
from dflash_core.decoding.graphs import fixed, new_cache
from dflash_core.decoding.sampling import Sampling, accept_greedy, accept_sampled, probabilities, sample
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target

# Prompt tokens read in one forward pass; a longer prompt is read alone.
MAX_PREFILL_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids up to and including the generation prompt, and the groups they are reported under."""

    token_ids: tuple[int, ...]
    prompt_set: str = "prompts"
    category: str | None = None


@dataclass
class Decoded:
    """Answers in the order of the prompts, and the wall time for all of them, prefill included."""

    generations: list[Generation]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(g.token_ids) for g in self.generations) / self.seconds if self.seconds else 0.0

    def __add__(self, other: Decoded) -> Decoded:
        return Decoded(self.generations + other.generations, self.seconds + other.seconds)


class _Rows:
    """Prompts on their way through the rows of a cache: waiting, being answered (live), finished.

    A row whose answer is complete takes the next waiting prompt at once, so that steps stay full while
    prompts are left. Live rows are 0..B-1: when a row ends, one of the last live rows moves into its place.

    Args:
        numbers: of each prompt, to name its random stream.
        margin: slots beyond the last new token that a verification may write.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        numbers: Sequence[int],
        sampling: Sampling,
        margin: int,
    ) -> None:
        _check_ids(target, prompts)
        self.target, self.prompts, self.sampling = target, prompts, sampling
        self.generations = [Generation() for _ in prompts]
        self.waiting = deque(range(len(prompts)))
        # Prompt in each row.
        self.live: list[int] = []
        # Prompts with a complete answer, in the order in which they were completed.
        self.finished: list[int] = []
        self.streams = [
            np.random.Generator(np.random.Philox(key=[sampling.seed, number])) for number in numbers
        ]
        self.num_rows = min(sampling.batch_size, len(prompts))
        self.num_slots = max(len(p.token_ids) for p in prompts) + sampling.max_new_tokens + margin
        self.cache = new_cache(target, self.num_rows, self.num_slots)
        self.lengths_B = torch.zeros(0, dtype=torch.int64, device=target.device)
        self.anchors_B = self.lengths_B

    def refill(self, context: DrafterContext | None = None) -> bool:
        """Drop finished rows and read waiting prompts into the free ones; False when no row is left."""
        while True:
            remaining = self._drop_finished()
            if remaining is not None and context is not None:
                context.keep_rows(remaining)
            admitted = self._admit()
            if admitted is None:
                return bool(self.live)
            if context is not None:
                context.append(*admitted)

    def _admit(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Read waiting prompts into free rows, packed; None when no prompt waits or no row is free.

        Returns:
            Features [T, L * D], positions [T] and rows [T] of their tokens.
        """
        new: list[int] = []
        num_tokens = 0
        while self.waiting and len(self.live) + len(new) < self.num_rows:
            num_tokens += len(self.prompts[self.waiting[0]].token_ids)
            if new and num_tokens > MAX_PREFILL_TOKENS:
                break
            new.append(self.waiting.popleft())
        if not new:
            return None
        tokens = np.concatenate([np.asarray(self.prompts[i].token_ids, dtype=np.int64) for i in new])
        lengths = torch.tensor([len(self.prompts[i].token_ids) for i in new])
        bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        first, device = len(self.live), self.target.device
        hidden_TD, features, rows_T, positions_T = self.target.prefill(
            torch.as_tensor(tokens, device=device), bounds, self.cache, first
        )
        self.live += new
        self.lengths_B = torch.cat([self.lengths_B, lengths.to(device)])
        self.choose(self.target.logits(hidden_TD[(bounds[1:] - 1).to(device)]), first)
        return features, positions_T, rows_T

    def choose(self, logits_BV: Tensor, first: int = 0) -> None:
        """Choose the target's own next token of each row from `first` on; it becomes the row's anchor."""
        live = self.live[first:]
        if self.sampling.temperature:
            weights_BV = probabilities(logits_BV, self.sampling.temperature)
            tokens_B = sample(weights_BV, self.uniforms(1, first)[:, 0])
        else:
            tokens_B = logits_BV.argmax(-1)
        self.anchors_B = torch.cat([self.anchors_B[:first], tokens_B])
        for i, token in zip(live, tokens_B.tolist()):
            self.generations[i].first(token, limit=self.sampling.max_new_tokens, eos_ids=self.target.eos_ids)

    def take(self, drafts_Bk: Tensor, accepted_B: Tensor, bonus_B: Tensor) -> None:
        """Record a verification of each live row; the bonus becomes its anchor."""
        steps = zip(self.live, drafts_Bk.tolist(), accepted_B.tolist(), bonus_B.tolist())
        for i, drafts, count, bonus in steps:
            self.generations[i].take(
                drafts[:count],
                bonus,
                num_drafted=len(drafts),
                limit=self.sampling.max_new_tokens,
                eos_ids=self.target.eos_ids,
            )
        self.lengths_B, self.anchors_B = self.lengths_B + accepted_B + 1, bonus_B

    def uniforms(self, count: int, first: int = 0) -> Tensor:
        """Draw numbers in [0, 1), [B, count], each row from its prompt's own stream."""
        drawn = np.stack([self.streams[i].random(count) for i in self.live[first:]])
        return torch.as_tensor(drawn, device=self.target.device)

    def _drop_finished(self) -> Tensor | None:
        """Drop rows with a complete answer; return the rows that remain, or None when nothing changes."""
        remaining = remaining_rows([not self.generations[i].finished for i in self.live])
        if len(remaining) == len(self.live):
            return None
        self.finished += [i for i in self.live if self.generations[i].finished]
        self.live = [self.live[row] for row in remaining]
        rows = torch.tensor(remaining, dtype=torch.int64, device=self.target.device)
        self.lengths_B, self.anchors_B = self.lengths_B[rows], self.anchors_B[rows]
        self.cache.keep_rows(rows)
        return rows


@torch.inference_mode()
def plain_decode(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, *, numbers: Sequence[int] | None = None
) -> Decoded:
    """Decode with the target alone, one token per step, with a cache: the baseline and the reference output.

    Args:
        numbers: of each prompt, naming its random stream; default: its index. Pass them where the prompts are
            a part of a larger list, so that each answer stays the same.
    """
    started = time.perf_counter()
    answers = dict(plain_answers(target, prompts, sampling, numbers=numbers))
    return Decoded([answers[i] for i in range(len(prompts))], time.perf_counter() - started)


def plain_answers(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, *, numbers: Sequence[int] | None = None
) -> Iterator[tuple[int, Generation]]:
    """Yield the answers of `plain_decode` as soon as they are complete: the prompt's index and its answer.

    At most `batch_size` prompts are decoded at the same time; prompts start in their order.
    """
    num_yielded = 0
    for rows in _plain_steps(target, prompts, sampling, numbers):
        for i in rows.finished[num_yielded:]:
            yield i, rows.generations[i]
        num_yielded = len(rows.finished)


def plain_steps(target: Target, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[list[Generation]]:
    """Yield the answers of `plain_decode` so far, after the prefill and after each step."""
    for rows in _plain_steps(target, prompts, sampling, None):
        yield rows.generations


# As a decorator: the consumer's code does not run in inference mode.
@torch.inference_mode()
def _plain_steps(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, numbers: Sequence[int] | None
) -> Iterator[_Rows]:
    rows = _Rows(target, prompts, range(len(prompts)) if numbers is None else numbers, sampling, margin=0)

    def next_logits(tokens_B: Tensor, positions_B: Tensor) -> tuple[Tensor, ...]:
        hidden_B1D, _ = target.decode(tokens_B[:, None], rows.cache, positions_B[:, None])
        return (target.logits(hidden_B1D[:, 0]),)

    read = fixed(next_logits, rows.cache)
    while rows.refill():
        yield rows
        (logits_BV,) = read(rows.anchors_B, rows.lengths_B)
        rows.lengths_B = rows.lengths_B + 1
        rows.choose(logits_BV)
    yield rows


def speculative_decode(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
) -> Decoded:
    """Decode with target and drafter: the target's own output, more than one token per step where drafts fit.

    Args:
        numbers: as in `plain_decode`.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    check_pair(target, drafter)
    started = time.perf_counter()
    *_, generations = speculative_steps(target, drafter, prompts, sampling, numbers=numbers)
    return Decoded(generations, time.perf_counter() - started)


@torch.inference_mode()
def speculative_steps(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
) -> Iterator[list[Generation]]:
    """Yield the answers of `speculative_decode` so far, after the prefill and after each step.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    check_pair(target, drafter)
    numbers = range(len(prompts)) if numbers is None else numbers
    rows = _Rows(target, prompts, numbers, sampling, margin=drafter.shape.block_size)
    slots_K = torch.arange(drafter.shape.block_size, device=target.device)
    context = DrafterContext(drafter, rows.num_rows, rows.num_slots, like=target.embed_weight)

    def draft_logits(anchors_B: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        return (context.draft_logits(target, anchors_B, lengths_B),)

    def target_logits(block_BK: Tensor, lengths_B: Tensor) -> tuple[Tensor, ...]:
        positions_BK = lengths_B[:, None] + slots_K
        hidden_BKD, features = target.decode(block_BK, rows.cache, positions_BK)
        context.append(features, positions_BK)
        return (target.logits(hidden_BKD),)

    draft, verify = (fixed(run, rows.cache) for run in (draft_logits, target_logits))
    while rows.refill(context):
        yield rows.generations
        (draft_logits_BkV,) = draft(rows.anchors_B, rows.lengths_B)
        drafts_Bk, draft_probs = _choose_drafts(draft_logits_BkV, rows)
        block_BK = torch.cat([rows.anchors_B[:, None], drafts_Bk], dim=1)
        (logits_BKV,) = verify(block_BK, rows.lengths_B)
        accepted_B, bonus_B = _accept(logits_BKV, drafts_Bk, draft_probs, rows)
        rows.take(drafts_Bk, accepted_B, bonus_B)
    yield rows.generations


def _check_ids(target: Target, prompts: Sequence[Prompt]) -> None:
    """Check that the target's embedding has a row for every token of the prompts.

    Raises:
        UserError: it has not: the tokenizer has more tokens than the model, or a file is damaged.
    """
    vocab_size = target.embed_weight.shape[0]
    for number, prompt in enumerate(prompts, 1):
        if wrong := [token for token in prompt.token_ids if not 0 <= token < vocab_size]:
            raise UserError(
                f"prompt {number}: token id {wrong[0]}; allowed by the target's embedding: 0 to "
                f"{vocab_size - 1}. Take the tokenizer of the target"
            )


def remaining_rows(is_live: Sequence[bool]) -> list[int]:
    """Return the row for each place after finished rows are dropped: itself, or one from the end.

    [True, False, True, True] -> [0, 3, 2]; see `DecodeCache.keep_rows`.
    """
    live = [row for row, yes in enumerate(is_live) if yes]
    from_the_end = [row for row in live if row >= len(live)]
    return [row if is_live[row] else from_the_end.pop() for row in range(len(live))]


def _choose_drafts(logits_BkV: Tensor, rows: _Rows) -> tuple[Tensor, Tensor | None]:
    if not rows.sampling.temperature:
        return logits_BkV.argmax(-1), None
    probs = probabilities(logits_BkV, rows.sampling.temperature)
    return sample(probs, rows.uniforms(probs.shape[1])), probs


def _accept(
    logits_BKV: Tensor, drafts_Bk: Tensor, draft_probs: Tensor | None, rows: _Rows
) -> tuple[Tensor, Tensor]:
    if draft_probs is None:
        return accept_greedy(drafts_Bk, logits_BKV.argmax(-1))
    target_probs = probabilities(logits_BKV, rows.sampling.temperature)
    return accept_sampled(drafts_Bk, draft_probs, target_probs, rows.uniforms(logits_BKV.shape[1]))
