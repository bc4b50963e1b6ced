"""Evaluation by real decoding: both decoders, the same prompts, one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dflash_core.decoding.acceptance import Difference, Generation, acceptance_report, compare
from dflash_core.decoding.speculate import Decoded, Prompt, Sampling, plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target


@dataclass
class Evaluation:
    """Both decoders on the same prompts."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    block_size: int
    compute_dtype: torch.dtype
    plain: Decoded
    speculative: Decoded
    differences: list[Difference] = field(default_factory=list)

    @property
    def lossless(self) -> bool | None:
        """Whether greedy output is the target's own; None when sampling.

        float32 exactly. In bfloat16 a verification of a whole block rounds differently from one-token steps,
        so there each first difference has to be a near tie.
        """
        if self.sampling.temperature:
            return None
        if self.compute_dtype == torch.float32:
            return not self.differences
        return all(difference.near_tie for difference in self.differences)

    def __add__(self, other: Evaluation) -> Evaluation:
        """Both evaluations' prompts, one after the other; of one drafter with one sampling."""
        moved = [replace(d, prompt=d.prompt + len(self.prompts)) for d in other.differences]
        return replace(
            self,
            prompts=[*self.prompts, *other.prompts],
            plain=self.plain + other.plain,
            speculative=self.speculative + other.speculative,
            differences=[*self.differences, *moved],
        )

    def report(self) -> dict[str, Any]:
        """Figures over all prompts, by prompt set and by category, as JSON types."""
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
            "prompts_equal": len(self.prompts) - len(self.differences) if self.lossless is not None else None,
            "near_ties": sum(difference.near_tie for difference in self.differences),
            "differences": [vars(d) | {"near_tie": d.near_tie} for d in self.differences],
            "baseline_tokens_per_second": plain,
            "speculative_tokens_per_second": speculative,
            "speedup": speculative / plain if plain else None,
            "block_size": self.block_size,
            "max_new_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "batch_size": self.sampling.batch_size,
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            **{
                name: {key: acceptance_report(found, self.block_size) for key, found in by_key.items()}
                for name, by_key in groups.items()
            },
        }

    def records(self) -> list[dict[str, Any]]:
        """One JSON record a prompt: tokens, counts by step, where outputs part."""
        parted = {difference.prompt: difference for difference in self.differences}
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
                "first_difference": parted[i].position if i in parted else None,
                "margin_steps": parted[i].margin_steps if i in parted else None,
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
    """Decode all prompts both ways in one run, a batch at a time in turn so that both meet the same machine.

    `progress` is called after each batch with prompts done, prompts in all, acceptance length so far.

    Raises:
        UserError: no prompt, an empty one, or a drafter of another target.
    """
    if not prompts or any(not prompt.token_ids for prompt in prompts):
        raise UserError("evaluation.prompts: no prompt or an empty one; allowed: at least one token each")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit and longest + sampling.max_new_tokens > limit:
        raise UserError(
            f"evaluation.max_new_tokens: {sampling.max_new_tokens} after a prompt of {longest} tokens is not "
            f"allowed; allowed: {limit} positions of the target in all"
        )
    warm = Sampling(max_new_tokens=2, batch_size=1)
    plain_decode(target, prompts[:1], warm)
    speculative_decode(target, drafter, prompts[:1], warm)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))  # rows of a batch are padded
    plain, speculative = Decoded([], 0.0), Decoded([], 0.0)
    for first in range(0, len(prompts), sampling.batch_size):
        numbers = order[first : first + sampling.batch_size]
        batch = [prompts[i] for i in numbers]
        for total, run in (
            (plain, plain_decode(target, batch, sampling, numbers=numbers)),
            (speculative, speculative_decode(target, drafter, batch, sampling, numbers=numbers)),
        ):
            total.generations += run.generations
            total.seconds += run.seconds
        if progress is not None:
            so_far = acceptance_report(speculative.generations, drafter.shape.block_size)
            progress(first + len(batch), len(prompts), so_far["acceptance_length"])
    place = sorted(range(len(order)), key=order.__getitem__)  # of each prompt in what was decoded
    for total in (plain, speculative):
        total.generations = [total.generations[i] for i in place]
    differences = [] if sampling.temperature else compare(plain.generations, speculative.generations)
    return Evaluation(
        prompts, sampling, drafter.shape.block_size, target.compute_dtype, plain, speculative, differences
    )
