"""Evaluation of a drafter by real decoding: both decoders on the same prompts, on the same machine, in turn.

Guarantee: in float32 greedy output equals the target's own token by token; in bfloat16 it may differ where
the target's two best logits are nearly tied, and each first difference is reported. Both decoders share code,
so the beginning of one answer is compared with the model alone, too. Price: every prompt is decoded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from dflash_core.decoding.generate import answer_text
from dflash_core.decoding.near_ties import plain_margin
from dflash_core.decoding.prompt_sets import PromptSets
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Decoded, Prompt, plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.compute_dtype import dtype_name
from dflash_core.target.target import Target

# Tokens of one answer that are compared with the model alone.
COMPARED_TOKENS = 32


@dataclass
class Evaluation:
    """Answers of both decoders to the same prompts."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    block_size: int
    compute_dtype: torch.dtype
    plain: Decoded
    speculative: Decoded
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
        shifted = [replace(d, prompt=d.prompt + len(self.prompts)) for d in other.divergences]
        return replace(
            self,
            prompts=[*self.prompts, *other.prompts],
            plain=self.plain + other.plain,
            speculative=self.speculative + other.speculative,
            divergences=[*self.divergences, *shifted],
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
        plain, speculative = self.plain.tokens_per_second, self.speculative.tokens_per_second
        return {
            **acceptance_report(answers, self.block_size),
            "lossless": self.lossless,
            "prompts_equal": len(self.prompts) - len(self.divergences) if self.lossless is not None else None,
            "first_difference_from_model": self.model_divergence and self.model_divergence.as_dict(),
            "near_ties": sum(divergence.near_tie for divergence in self.divergences),
            "differences": [divergence.as_dict() for divergence in self.divergences],
            "baseline_tokens_per_second": plain,
            "speculative_tokens_per_second": speculative,
            "speedup": speculative / plain if plain else None,
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
    progress: Callable[[int, int, float], None] | None = None,
) -> Evaluation:
    """Decode all prompts both ways, alternating batch by batch, so that both run under the same machine load.

    Args:
        progress: called after each batch with the prompts done, all prompts, and the acceptance length so
            far.

    Raises:
        UserError: no prompt, an empty or a too long one, or a drafter of another target.
    """
    _check_prompts(target, prompts, sampling)
    warm_up = Sampling(max_new_tokens=2, batch_size=1)
    plain_decode(target, prompts[:1], warm_up)
    speculative_decode(target, drafter, prompts[:1], warm_up)
    # By length, because the rows of a batch take as many slots as its longest.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    plain, speculative = Decoded([], 0.0), Decoded([], 0.0)
    for first in range(0, len(prompts), sampling.batch_size):
        numbers = order[first : first + sampling.batch_size]
        batch = [prompts[i] for i in numbers]
        for total, decoded in (
            (plain, plain_decode(target, batch, sampling, numbers=numbers)),
            (speculative, speculative_decode(target, drafter, batch, sampling, numbers=numbers)),
        ):
            total.generations += decoded.generations
            total.seconds += decoded.seconds
        if progress is not None:
            progress(first + len(batch), len(prompts), acceptance_length(speculative.generations))
    place = sorted(range(len(order)), key=order.__getitem__)  # of each prompt in `order`
    for total in (plain, speculative):
        total.generations = [total.generations[i] for i in place]
    result = Evaluation(prompts, sampling, drafter.shape.block_size, target.compute_dtype, plain, speculative)
    if not sampling.temperature:

        def margin_at(i: int, position: int) -> float:
            return plain_margin(target, prompts[i].token_ids, plain.generations[i].token_ids, position)

        result.divergences = find_divergences(plain.generations, speculative.generations, margin_at)
        shortest = order[0]
        answer = plain.generations[shortest].token_ids[:COMPARED_TOKENS]
        result.model_divergence = difference_from_model(target, shortest, prompts[shortest], answer)
    return result


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


def _check_prompts(target: Target, prompts: Sequence[Prompt], sampling: Sampling) -> None:
    if not prompts or any(not prompt.token_ids for prompt in prompts):
        raise UserError("evaluation.prompts: no prompt or an empty one; allowed: at least one token each")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit and longest + sampling.max_new_tokens > limit:
        raise UserError(
            f"evaluation.max_new_tokens: {sampling.max_new_tokens} after a prompt of {longest} tokens is not "
            f"allowed; allowed: {limit} positions of the target in all"
        )


def decode_all(target: Target, drafter: DFlashDrafter, sets: PromptSets, sampling: Sampling) -> Evaluation:
    """Evaluate every turn of every prompt; later turns follow the target's own answers."""
    rows, prompts = sets.first()
    total = None
    answers: dict[int, list[str]] = {}
    while prompts:
        result = evaluate(target, drafter, prompts, sampling, progress=_print_progress)
        total = result if total is None else total + result
        if sets.encoder is None:
            break
        for row, answer in zip(rows, result.plain.generations, strict=True):
            answers.setdefault(row, []).append(answer_text(sets.tokenizer, answer))
        rows, prompts = sets.following({row: answers[row] for row in rows})
    assert total is not None
    return total


def _print_progress(done: int, total: int, length: float) -> None:
    print(f"evaluation: {done}/{total} prompts, acceptance length {length:.3f}", flush=True)
