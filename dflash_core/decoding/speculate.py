"""Speculative decoding with a DFlash drafter, plain decoding beside it, and the evaluation that compares
them.

A step of a row whose first n positions are known to both models, with the token of position n (the anchor)
chosen and not yet read by the target:

    draft     the drafter fills slots 1..K-1 of [anchor, MASK, ...] at positions n..n+K-1 over its context
    0..n-1 verify    the target reads [anchor, drafts] at the same positions over its cache
    accept    greedy: the longest run of drafts that are the target's own argmax, then the target's next
    token;
              sampling: the rule of Leviathan et al. (arXiv 2211.17192), whose output is distributed as the
                  target's

Output is the target's own, whatever the drafter proposes. Rows advance at their own pace: both caches are
addressed by position, and what a row rejected is overwritten before anyone looks. The drafter's context keys
and values are projected once for each position and kept by layer.

Random numbers come from a stream of each prompt's own, so a prompt's answer does not depend on the batch it
is in.

Shape letters: B rows, K block size, T packed prompt tokens, M cache slots, D width, V vocabulary, G key/value
heads, H head dim.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_core.decoding.acceptance import Generation, bfloat16_steps
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.decode_cache import DecodeCache, move_rows
from dflash_core.target.target import Target

MAX_PREFILL_TOKENS = 8192  # of prompts read in one forward pass, where there is more than one


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids up to and including the generation prompt, and what group they are reported under."""

    token_ids: tuple[int, ...]
    prompt_set: str = "prompts"
    category: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when a prompt ends."""

    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    seed: int = 0
    batch_size: int = 1  # prompts in work at a time


@dataclass
class Decoded:
    """Answers in the order of the prompts, and the wall time of all of them, prefill included."""

    generations: list[Generation]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(g.token_ids) for g in self.generations) / self.seconds if self.seconds else 0.0

    def __add__(self, other: Decoded) -> Decoded:
        return Decoded(self.generations + other.generations, self.seconds + other.seconds)


class DrafterContext:
    """The drafter's view of accepted tokens: keys and values by layer, at the slot of their row and position."""

    def __init__(self, drafter: DFlashDrafter, num_rows: int, num_slots: int, like: Tensor) -> None:
        self.drafter, self.num_slots = drafter, num_slots
        shape = (num_rows * num_slots, drafter.shape.num_kv_heads, drafter.shape.head_dim)
        self.layers = [
            (like.new_zeros(shape), like.new_zeros(shape)) for _ in range(drafter.shape.num_layers)
        ]

    def append(self, features: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        """Project and store features at their positions, rejected ones too: see the module's docstring.

        Args:
            features, positions: [B, K, L * D] and [B, K], of rows 0..B-1; or packed, [T, L * D] and [T].
            rows: [T] of packed ones.
        """
        keys = self.layers[0][0]
        if rows is None:
            rows = torch.arange(len(positions), device=keys.device)[:, None]
        context = self.drafter.project_context(features.flatten(0, -2).to(keys.dtype))
        slots = (rows * self.num_slots + positions).flatten()
        for stored, new in zip(self.layers, self.drafter.project_layers(context, positions.flatten())):
            for buffer, states in zip(stored, new):
                buffer[slots] = states

    def keep_rows(self, rows: Tensor) -> None:
        """Drop finished rows, see `DecodeCache.keep_rows`."""
        for pair in self.layers:
            for buffer in pair:
                move_rows(buffer.unflatten(0, (-1, self.num_slots)), rows)

    def draft_logits(self, target: Target, anchor_tokens_B: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits [B, K - 1, V] of the slots after anchors at positions `lengths_B`."""
        shape = self.drafter.shape
        num_rows = len(anchor_tokens_B)
        ids_BK = anchor_tokens_B.new_full((num_rows, shape.block_size), shape.mask_token_id)
        ids_BK[:, 0] = anchor_tokens_B
        embeds_BKD = torch.nn.functional.embedding(ids_BK, target.embed_weight)
        start_B = torch.arange(num_rows, device=ids_BK.device, dtype=torch.int32) * self.num_slots
        hidden_BKD = self.drafter.forward_blocks(
            embeds_BKD, self.layers, context_start_A=start_B, anchor_A=start_B + lengths_B.int()
        )
        return target.logits(hidden_BKD[:, 1:])


class _Rows:
    """Prompts on their way through at most `num_rows` rows of a cache: those that wait, those being answered.

    A row whose answer is complete takes the next waiting prompt at once, so that steps stay full while prompts
    are left. Live rows are 0..B-1: the last ones move into the places that come free.

    Args:
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
        self.target, self.prompts, self.sampling = target, prompts, sampling
        self.generations = [Generation() for _ in prompts]
        self.waiting = deque(range(len(prompts)))
        self.live: list[int] = []  # prompt in each row
        self.finished: list[int] = []  # prompts that are done, in the order in which they got done
        self.streams = [
            np.random.Generator(np.random.Philox(key=[sampling.seed, number])) for number in numbers
        ]
        self.num_rows = min(sampling.batch_size, len(prompts))
        self.num_slots = max(len(p.token_ids) for p in prompts) + sampling.max_new_tokens + margin
        self.cache = DecodeCache(self.num_rows, self.num_slots)
        self.lengths_B = torch.zeros(0, dtype=torch.int64, device=target.device)
        self.anchors_B = self.lengths_B

    def refill(self, context: DrafterContext | None = None) -> bool:
        """Drop finished rows and read waiting prompts into the free ones; False when no row is left."""
        while True:
            kept = self._drop_finished()
            if kept is not None and context is not None:
                context.keep_rows(kept)
            read = self._admit()
            if read is None:
                return bool(self.live)
            if context is not None:
                context.append(*read)

    def _admit(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Read prompts, packed: features [T, L * D], positions [T], rows [T]; None when none can come in."""
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
        """The target's own next token of each row from `first` on becomes its anchor."""
        live = self.live[first:]
        if self.sampling.temperature:
            weights_BV = probabilities(logits_BV, self.sampling.temperature)
            tokens_B = sample(weights_BV, self.uniforms(1, first)[:, 0])
        else:
            top = logits_BV.float().topk(2, dim=-1)
            tokens_B = top.indices[:, 0]
            for i, margin in zip(live, bfloat16_steps(*top.values.cpu().numpy().T)):
                self.generations[i].margins.append(float(margin))
        self.anchors_B = torch.cat([self.anchors_B[:first], tokens_B])
        for i, token in zip(live, tokens_B.tolist()):
            self.generations[i].first(token, limit=self.sampling.max_new_tokens, eos_ids=self.target.eos_ids)

    def take(self, drafts_Bk: Tensor, accepted_B: Tensor, bonus_B: Tensor) -> None:
        """Record a verification of each live row; the bonus becomes the anchor."""
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
        """[B, count] numbers in [0, 1), each row from its prompt's own stream."""
        drawn = np.stack([self.streams[i].random(count) for i in self.live[first:]])
        return torch.as_tensor(drawn, device=self.target.device)

    def _drop_finished(self) -> Tensor | None:
        """Rows that go on, when some do not; None when nothing changes. See `DecodeCache.keep_rows`."""
        places = rows_that_go_on([not self.generations[i].finished for i in self.live])
        if len(places) == len(self.live):
            return None
        self.finished += [i for i in self.live if self.generations[i].finished]
        self.live = [self.live[row] for row in places]
        rows = torch.tensor(places, dtype=torch.int64, device=self.target.device)
        self.lengths_B, self.anchors_B = self.lengths_B[rows], self.anchors_B[rows]
        self.cache.keep_rows(rows)
        return rows


@torch.inference_mode()
def plain_decode(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, *, numbers: Sequence[int] | None = None
) -> Decoded:
    """The target alone, one token a step, with a cache: the baseline, and the truth of greedy decoding.

    `numbers` are those of the prompts where these are a part of more: they name the random streams.
    """
    started = time.perf_counter()
    found = dict(plain_answers(target, prompts, sampling, numbers=numbers))
    return Decoded([found[i] for i in range(len(prompts))], time.perf_counter() - started)


def plain_answers(
    target: Target, prompts: Sequence[Prompt], sampling: Sampling, *, numbers: Sequence[int] | None = None
) -> Iterator[tuple[int, Generation]]:
    """`plain_decode`, prompt by prompt as answers get done: the prompt's place and its answer.

    At most `batch_size` prompts are in work at a time; prompts are taken in their order.
    """
    rows = _Rows(target, prompts, range(len(prompts)) if numbers is None else numbers, sampling, margin=0)
    told = 0
    while True:
        with torch.inference_mode():  # not around the yield: the consumer's code is none of this function's
            goes_on = rows.refill()
            if goes_on:
                hidden_B1D, _ = target.decode(rows.anchors_B[:, None], rows.cache, rows.lengths_B[:, None])
                rows.lengths_B = rows.lengths_B + 1
                rows.choose(target.logits(hidden_B1D[:, 0]))
        for i in rows.finished[told:]:
            yield i, rows.generations[i]
        told = len(rows.finished)
        if not goes_on:
            return


@torch.inference_mode()
def speculative_decode(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
) -> Decoded:
    """The target's own output, several tokens a step where the drafter guesses right. See `plain_decode`.

    Raises:
        UserError: the drafter was trained for other layers, another width or another vocabulary.
    """
    check_pair(target, drafter)
    started = time.perf_counter()
    numbers = range(len(prompts)) if numbers is None else numbers
    rows = _Rows(target, prompts, numbers, sampling, margin=drafter.shape.block_size)
    slots_K = torch.arange(drafter.shape.block_size, device=target.device)
    context = DrafterContext(drafter, rows.num_rows, rows.num_slots, like=target.embed_weight)
    while rows.refill(context):
        positions_BK = rows.lengths_B[:, None] + slots_K
        draft_logits_BkV = context.draft_logits(target, rows.anchors_B, rows.lengths_B)
        drafts_Bk, draft_probs = _choose_drafts(draft_logits_BkV, rows)
        block_BK = torch.cat([rows.anchors_B[:, None], drafts_Bk], dim=1)
        hidden_BKD, features = target.decode(block_BK, rows.cache, positions_BK)
        context.append(features, positions_BK)
        accepted_B, bonus_B = _accept(target.logits(hidden_BKD), drafts_Bk, draft_probs, rows)
        rows.take(drafts_Bk, accepted_B, bonus_B)
    return Decoded(rows.generations, time.perf_counter() - started)


def rows_that_go_on(goes_on: Sequence[bool]) -> list[int]:
    """Which row each place takes: its own, or one from behind the last that stays (`DecodeCache.keep_rows`).

    [True, False, True, True] -> [0, 3, 2]
    """
    keep = [row for row, yes in enumerate(goes_on) if yes]
    behind = [row for row in keep if row >= len(keep)]
    return [row if goes_on[row] else behind.pop() for row in range(len(keep))]


def check_pair(target: Target, drafter: DFlashDrafter) -> None:
    """A drafter reads exactly the layers it was trained on, of a target of its own width and vocabulary."""
    shape = drafter.shape
    facts = {
        "target_layer_ids": (list(shape.target_layer_ids), list(target.layer_ids)),
        "num_target_layers": (shape.num_target_layers, len(target.layers)),
        "hidden_size": (shape.hidden_size, target.width_D),
        "vocab_size": (shape.vocab_size, target.embed_weight.shape[0]),
    }
    for name, (trained, found) in facts.items():
        if trained != found:
            raise UserError(
                f"drafter: {name} is {trained}, the target has {found}; allowed: the target it was made for"
            )


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float64: the acceptance rule compares ratios and differences of it."""
    return torch.softmax(logits.double() / temperature, dim=-1)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from unnormalised weights [..., V] by one number of [0, 1) each.

    The first index whose running sum exceeds that share of the total; an index of weight zero is never drawn.
    """
    running = weights.cumsum(-1)
    drawn = torch.searchsorted(running, (uniforms * running[..., -1])[..., None], right=True)[..., 0]
    return drawn.clamp(max=weights.shape[-1] - 1)


def accept_greedy(drafts_Bk: Tensor, own_BK: Tensor) -> tuple[Tensor, Tensor]:
    """How many leading drafts are the target's own tokens, and its token after those: [B] each.

    Drafts 5 7 9 against the target's 5 7 4 8: two accepted, then 4.
    """
    accepted_B = (drafts_Bk == own_BK[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    return accepted_B, own_BK.gather(1, accepted_B[:, None])[:, 0]


def accept_sampled(
    drafts_Bk: Tensor, draft_probs_BkV: Tensor, target_probs_BKV: Tensor, uniforms_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """The lossless rule (arXiv 2211.17192, algorithm 1): accepted drafts and the token after them, [B] each.

    Draft k is kept while u_k < p_k(d_k) / q_k(d_k). The next token is drawn from max(p - q, 0), normalised,
    at the first rejection, and from p behind the last draft; so every emitted token is distributed as p.
    """
    index = drafts_Bk[..., None]
    ratio_Bk = (target_probs_BKV[:, :-1].gather(2, index) / draft_probs_BkV.gather(2, index))[..., 0]
    accepted_B = (uniforms_BK[:, :-1] < ratio_Bk).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafts_Bk), device=drafts_Bk.device)
    target_BV = target_probs_BKV[rows, accepted_B]
    rejected_B = accepted_B < drafts_Bk.shape[1]
    draft_BV = draft_probs_BkV[rows, accepted_B.clamp(max=drafts_Bk.shape[1] - 1)]
    residual_BV = (target_BV - draft_BV).clamp(min=0)
    # p == q to the last bit leaves nothing to draw from, and then a rejection cannot have happened but by
    # rounding
    use_B = rejected_B & (residual_BV.sum(-1) > 0)
    return accepted_B, sample(torch.where(use_B[:, None], residual_BV, target_BV), uniforms_BK[:, -1])


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
