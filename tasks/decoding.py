"""Prompts of an evaluation, and their decoding turn after turn. Imports torch: load it where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, from_dict
from dflash_core.data.chat import ChatEncoder, Rejection, load_tokenizer
from dflash_core.data.prompts import ChatPrompt, read_prompts
from dflash_core.data.store import TokenStore
from dflash_core.decoding.evaluate import Evaluation, evaluate
from dflash_core.decoding.speculate import Prompt, Sampling
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tasks.evaluate import VALIDATION_SET


def validation_prompts(shards: list[str], data: DataConfig, limit: int) -> list[tuple[int, ...]]:
    """Tokens before the first supervised one of the first `limit` validation samples by content digest."""
    store = TokenStore.open(
        shards, validation_share=data.validation_share, min_validation_samples=data.min_validation_samples
    )
    ordered = sorted((store.sample_id(int(row)), int(row)) for row in store.validation_indices)
    prompts = []
    for _, row in ordered:
        first = int(store.loss_mask(row).argmax())
        if first > 0:
            prompts.append(tuple(store.token_ids(row)[:first].tolist()))
        if len(prompts) == limit:
            break
    if not prompts:
        raise UserError(
            "evaluation.prompts: there are no validation samples to take prompts from; allowed: prompt "
            f"files, or a data.validation_share above {data.validation_share}"
        )
    return prompts


class PromptSets:
    """The prompts of a run, turn after turn: the second turn of a row needs the model's own first answer."""

    def __init__(self, prompt_sets: list[dict[str, str]], num_prompts: int, where: dict[str, Any]) -> None:
        self.rows: list[tuple[str, ChatPrompt]] = []
        self.data: DataConfig = from_dict(DataConfig, where["data"])
        self.encoder: ChatEncoder | None = None
        self.fixed: list[Prompt] = []
        if not where["prompt_paths"]:
            found = validation_prompts(where["shards"], self.data, num_prompts)
            self.fixed = [Prompt(token_ids=ids, prompt_set=VALIDATION_SET) for ids in found]
            return
        self.tokenizer = load_tokenizer(
            where["target_directory"], trust_remote_code=where["trust_remote_code"]
        )
        self.encoder = ChatEncoder(self.tokenizer, self.data, None)
        for prompt_set, path in zip(prompt_sets, where["prompt_paths"], strict=True):
            prompts = read_prompts(Path(path), limit=num_prompts)
            self.rows += [(prompt_set["name"], prompt) for prompt in prompts]

    def first(self) -> tuple[list[int], list[Prompt]]:
        """Rows and prompts of the first turn."""
        if self.encoder is None:
            return list(range(len(self.fixed))), self.fixed
        return self.following({row: [] for row in range(len(self.rows))})

    def following(self, answers: dict[int, list[str]]) -> tuple[list[int], list[Prompt]]:
        """Rows that have another turn after these answers, and its prompts.

        Raises:
            UserError: the template refuses a prompt.
        """
        rows, prompts = [], []
        for row, given in answers.items():
            name, chat = self.rows[row]
            messages = chat.messages(given)
            if messages is None:
                continue
            assert self.encoder is not None
            ids = self.encoder.prompt_ids(messages)
            if isinstance(ids, Rejection):
                raise UserError(f"evaluation.prompts: {name} prompt {row + 1}: {ids.reason} ({ids.detail})")
            rows.append(row)
            prompts.append(Prompt(token_ids=tuple(ids), prompt_set=name, category=chat.category))
        return rows, prompts


def decode_all(target: Target, drafter: DFlashDrafter, sets: PromptSets, sampling: Sampling) -> Evaluation:
    """Every turn of every prompt, both ways; later turns follow the target's own answers."""
    rows, prompts = sets.first()
    total = None
    answers: dict[int, list[str]] = {}
    while prompts:
        result = evaluate(target, drafter, prompts, sampling, progress=_show_progress)
        total = result if total is None else total + result
        if sets.encoder is None:
            break
        for row, answer in zip(rows, result.plain.generations, strict=True):
            text = sets.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            answers.setdefault(row, []).append(text)
        rows, prompts = sets.following({row: answers[row] for row in rows})
    assert total is not None
    return total


def _show_progress(done: int, total: int, acceptance_length: float) -> None:
    print(f"evaluation: {done}/{total} prompts, acceptance length {acceptance_length:.3f}", flush=True)
