"""Evaluation of a drafter by real decoding: both decoders on the same prompts, on the same machine, in turn.

Guarantee: in float32 greedy output equals the target's own token by token; in bfloat16 it may differ where
the target's two best logits are nearly tied, and each first difference is reported. Both decoders share code,
so the beginning of one answer is compared with the model alone, too. Price: every prompt is decoded twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dflash_core.decoding.acceptance import (
    Divergence,
    Generation,
    acceptance_length,
    acceptance_report,
    bfloat16_steps,
    find_divergences,
)
from dflash_core.decoding.near_ties import plain_margin
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.shares import ALONE, Share
from dflash_core.decoding.speculate import Decoded, Prompt, plain_decode, speculative_decode
from dflash_core.decoding.speed import Timing, speed_report
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.target import Target

# Tokens of one answer that are compared with the model alone.
COMPARED_TOKENS = 32

# Called after each batch with the prompts done, all prompts, the acceptance length so far, and seconds spent.
Progress = Callable[[int, int, float, float], None]


@dataclass
class Evaluation:
    """Answers of both decoders to the same prompts."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    block_size: int
    compute_dtype: torch.dtype
    plain: Decoded
    speculative: Decoded
    # one per batch; the prompts of a batch are of one set
    timings: list[Timing]
    divergences: list[Divergence] = field(default_factory=list)
    # first difference of a plain answer from the model alone; None: equal
    model_divergence: Divergence | None = None

    @property
    def lossless(self) -> bool | None:
        """True when greedy output is the target's own; None when sampling.

        In float32 every token has to be equal. In bfloat16 verifying a whole block rounds differently from
        one-token steps, so there each first difference has to be a near tie.
        """
        if self.sampling.temperature:
            return None
        found = [*self.divergences, *([self.model_divergence] if self.model_divergence else [])]
        if self.compute_dtype == torch.float32:
            return not found
        return all(divergence.near_tie for divergence in found)

    def __add__(self, other: Evaluation) -> Evaluation:
        """Append another evaluation's prompts; both are of one drafter with one sampling."""
        first = len(self.prompts)
        divergences = [replace(d, prompt=d.prompt + first) for d in other.divergences]
        timings = [replace(t, prompts=tuple(first + i for i in t.prompts)) for t in other.timings]
        return replace(
            self,
            prompts=[*self.prompts, *other.prompts],
            plain=self.plain + other.plain,
            speculative=self.speculative + other.speculative,
            timings=[*self.timings, *timings],
            divergences=[*self.divergences, *divergences],
            model_divergence=self.model_divergence or other.model_divergence,
        )

    def report(self) -> dict[str, Any]:
        """Return the figures over all prompts, by prompt set and by category, as JSON types."""
        answers = self.speculative.generations
        groups: dict[str, dict[str, list[Generation]]] = {"sets": {}, "categories": {}}
        for prompt, answer in zip(self.prompts, answers):
            groups["sets"].setdefault(prompt.prompt_set, []).append(answer)
            if prompt.category is not None:
                groups["categories"].setdefault(f"{prompt.prompt_set}/{prompt.category}", []).append(answer)
        report: dict[str, Any] = {
            **acceptance_report(answers, self.block_size),
            "lossless": self.lossless,
            "prompts_equal": len(self.prompts) - len(self.divergences) if self.lossless is not None else None,
            "first_difference_from_model": self.model_divergence and self.model_divergence.as_dict(),
            "near_ties": sum(divergence.near_tie for divergence in self.divergences),
            "differences": [divergence.as_dict() for divergence in self.divergences],
            **speed_report(self.timings),
            "block_size": self.block_size,
            "max_new_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "batch_size": self.sampling.batch_size,
            "compute_dtype": dtype_name(self.compute_dtype),
            **{
                name: {key: acceptance_report(group, self.block_size) for key, group in by_key.items()}
                for name, by_key in groups.items()
            },
        }
        for name, figures in report["sets"].items():
            of_set = [t for t in self.timings if self.prompts[t.prompts[0]].prompt_set == name]
            figures |= speed_report(of_set)
        return report

    def records(self) -> list[dict[str, Any]]:
        """Return one JSON record per prompt: tokens, counts per step, first divergence."""
        diverged = {divergence.prompt: divergence for divergence in self.divergences}
        return [
            {
                "prompt": i,
                "prompt_set": prompt.prompt_set,
                "category": prompt.category,
                "prompt_tokens": len(prompt.token_ids),
                "token_ids": answer.token_ids,
                "finished": answer.finished,
                "emitted": answer.emitted,
                "accepted": answer.accepted,
                "drafted": answer.drafted,
                "first_difference": diverged[i].position if i in diverged else None,
                "margin_steps": diverged[i].margin_steps if i in diverged else None,
            }
            for i, (prompt, answer) in enumerate(zip(self.prompts, self.speculative.generations))
        ]


def evaluate(
    target: Target,
    drafter: DFlashDrafter,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    numbers: Sequence[int] | None = None,
    share: Share = ALONE,
    progress: Progress | None = None,
) -> Evaluation:
    """Decode all prompts both ways, alternating batch by batch, so that both run under the same machine load.

    Args:
        numbers: of each prompt, naming its random stream; default: its index.
        share: this process's part of the batches; every rank returns all results.
        progress: called for this rank's prompts alone.

    Raises:
        UserError: no prompt, an empty or a too long one, or a drafter of another target.
    """
    _check_prompts(target, prompts, sampling)
    numbers = range(len(prompts)) if numbers is None else numbers
    warm_up = Sampling(max_new_tokens=2, batch_size=1)
    plain_decode(target, prompts[:1], warm_up)
    speculative_decode(target, drafter, prompts[:1], warm_up)
    batches = batches_of(prompts, sampling.batch_size)
    mine = share.of(len(batches))
    num_mine, started = sum(len(batches[b]) for b in mine), time.perf_counter()
    done: dict[int, tuple[Decoded, Decoded]] = {}
    seen: list[Generation] = []
    for b in mine:
        batch, streams = [prompts[i] for i in batches[b]], [numbers[i] for i in batches[b]]
        done[b] = _decode_both(target, drafter, batch, sampling, streams, plain_first=b % 2 == 0)
        seen += done[b][1].generations
        if progress is not None:
            progress(len(seen), num_mine, acceptance_length(seen), time.perf_counter() - started)
    decoded = share.merge(done)
    plain, speculative = (
        _in_order(batches, [both[kind] for both in decoded], len(prompts)) for kind in (0, 1)
    )
    timings = [
        Timing(
            prompts=tuple(batch),
            plain_tokens=sum(len(g.token_ids) for g in both[0].generations),
            plain_seconds=both[0].seconds,
            speculative_tokens=sum(len(g.token_ids) for g in both[1].generations),
            speculative_seconds=both[1].seconds,
        )
        for batch, both in zip(batches, decoded, strict=True)
    ]
    block_size, dtype = drafter.shape.block_size, target.compute_dtype
    result = Evaluation(prompts, sampling, block_size, dtype, plain, speculative, timings)
    if not sampling.temperature:

        def margin_at(i: int, position: int) -> float:
            return plain_margin(target, prompts[i].token_ids, plain.generations[i].token_ids, position)

        result.divergences = find_divergences(plain.generations, speculative.generations, margin_at)
        shortest = min(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        answer = plain.generations[shortest].token_ids[:COMPARED_TOKENS]
        result.model_divergence = difference_from_model(target, shortest, prompts[shortest], answer)
    return result


def batches_of(prompts: Sequence[Prompt], batch_size: int) -> list[list[int]]:
    """Return the indices of the prompts in batches: each of one set, and of prompts of similar length.

    By length, because the rows of a batch take as many slots as its longest. Sets keep their order.
    """
    by_set: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_set.setdefault(prompt.prompt_set, []).append(i)
    batches = []
    for members in by_set.values():
        members.sort(key=lambda i: len(prompts[i].token_ids))
        batches += [members[first : first + batch_size] for first in range(0, len(members), batch_size)]
    return batches


def _decode_both(
    target: Target,
    drafter: DFlashDrafter,
    batch: Sequence[Prompt],
    sampling: Sampling,
    numbers: Sequence[int],
    *,
    plain_first: bool,
) -> tuple[Decoded, Decoded]:
    """Decode a batch without and with the drafter, in either order, so that drift falls on both."""
    speculative = None
    if not plain_first:
        speculative = speculative_decode(target, drafter, batch, sampling, numbers=numbers)
    plain = plain_decode(target, batch, sampling, numbers=numbers)
    return plain, speculative or speculative_decode(target, drafter, batch, sampling, numbers=numbers)


def _in_order(batches: Iterable[Sequence[int]], decoded: Iterable[Decoded], num_prompts: int) -> Decoded:
    """Return the answers of all batches in the order of the prompts."""
    answers: list[Generation] = [Generation()] * num_prompts
    seconds = 0.0
    for batch, part in zip(batches, decoded, strict=True):
        seconds += part.seconds
        for i, answer in zip(batch, part.generations, strict=True):
            answers[i] = answer
    return Decoded(answers, seconds)


def difference_from_model(
    target: Target, number: int, prompt: Prompt, answer: Sequence[int]
) -> Divergence | None:
    """Return the first token of a greedy answer that the model alone would not have written, or None.

    One forward of the model over prompt and answer says it: each token has to be the argmax behind the ones
    before it.

    Args:
        number: of the prompt, for the result.
    """
    if not answer:
        return None
    rows = target.own_logits([*prompt.token_ids, *answer])[len(prompt.token_ids) - 1 : -1].float()
    chosen = torch.tensor(list(answer), device=rows.device)
    wrong = (rows.argmax(dim=-1) != chosen).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    steps = bfloat16_steps(rows[at].max().cpu().numpy(), rows[at, chosen[at]].cpu().numpy())
    return Divergence(number, at, float(steps))


def has_room(target: Target, prompt: Prompt, sampling: Sampling) -> bool:
    """Return True if the target has positions for the prompt and its longest answer."""
    limit = getattr(target.config, "max_position_embeddings", None)
    return not limit or len(prompt.token_ids) + sampling.max_new_tokens <= limit


def _check_prompts(target: Target, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    if not prompts or any(not prompt.token_ids for prompt in prompts):
        raise UserError("evaluation.prompts: no prompt or an empty one; allowed: at least one token each")
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if not has_room(target, longest, sampling):
        raise UserError(
            f"evaluation.max_new_tokens: {sampling.max_new_tokens} after a prompt of "
            f"{len(longest.token_ids)} tokens is not allowed; allowed: "
            f"{target.config.max_position_embeddings} positions of the target in all"
        )
