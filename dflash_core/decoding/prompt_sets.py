"""Prompts of an evaluation: those of prompt files, turn by turn, or those of the validation samples.

A later turn of a row needs the target's own answer to the turn before, so prompts are asked for one turn at a
time (`PromptSets.first`, `PromptSets.following`). Validation prompts end right before the first supervised
token: the target answers the same question as the data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatEncoder, Rejection, load_tokenizer
from dflash_core.data.prompts import ChatPrompt, read_prompts
from dflash_core.data.store import TokenStore, open_store
from dflash_core.decoding.evaluation_inputs import VALIDATION_SET, EvaluationInputs
from dflash_core.decoding.speculate import Prompt
from dflash_core.errors import UserError


def validation_prompts(
    store: TokenStore, rows: Iterable[int], limit: int, *, min_supervised_tokens: int = 1
) -> list[Prompt]:
    """Return the tokens before the first supervised one, for the first `limit` rows that have any.

    Args:
        rows: rows of the store, in the order in which they are tried.
        min_supervised_tokens: rows with fewer supervised tokens are skipped.
    """
    prompts: list[Prompt] = []
    for row in map(int, rows):
        supervised = np.flatnonzero(store.loss_mask(row))
        if len(supervised) >= min_supervised_tokens and supervised[0] > 0:
            tokens = store.token_ids(row)[: supervised[0]]
            prompts.append(Prompt(token_ids=tuple(tokens.tolist()), prompt_set=VALIDATION_SET))
        if len(prompts) == limit:
            break
    return prompts


def spread(count: int, limit: int) -> list[int]:
    """Return up to `limit` of the numbers 0..count - 1, evenly spaced: the rows of a file are often sorted.

    spread(8, 3) == [0, 2, 5]
    """
    chosen = min(count, limit)
    return [i * count // chosen for i in range(chosen)]


class PromptSets:
    """The prompts of one evaluation.

    Args:
        names: name of each prompt set, in the order of `inputs.prompt_paths`; unused without prompt files.
        num_prompts: at most this many rows per prompt file, evenly spaced, or validation samples.
        inputs: the prompt files, or the shards that hold the validation samples.

    Raises:
        UserError: a prompt file cannot be read, or there are no validation prompts.
    """

    def __init__(self, names: list[str], num_prompts: int, inputs: EvaluationInputs) -> None:
        self.rows: list[tuple[str, ChatPrompt]] = []
        self.encoder: ChatEncoder | None = None
        self.validation: list[Prompt] = []
        if not inputs.prompt_paths:
            self.validation = _stored_prompts(inputs.shards, inputs.data, num_prompts)
            return
        self.tokenizer = load_tokenizer(inputs.target_directory, trust_remote_code=inputs.trust_remote_code)
        self.encoder = ChatEncoder(self.tokenizer, inputs.data, None)
        for name, path in zip(names, inputs.prompt_paths, strict=True):
            prompts = read_prompts(Path(path), inputs.data)
            self.rows += [(name, prompts[i]) for i in spread(len(prompts), num_prompts)]

    def first(self) -> tuple[list[int], list[Prompt]]:
        """Return the rows and prompts of the first turn."""
        if self.encoder is None:
            return list(range(len(self.validation))), self.validation
        return self.following({row: [] for row in range(len(self.rows))})

    def following(self, answers: dict[int, list[str]]) -> tuple[list[int], list[Prompt]]:
        """Return the rows that have another turn after these answers, and the prompts of that turn.

        Raises:
            UserError: the template rejects a prompt.
        """
        rows, prompts = [], []
        for row, given in answers.items():
            name, chat = self.rows[row]
            messages = chat.messages(given)
            if messages is None:
                continue
            assert self.encoder is not None
            ids = self.encoder.prompt_ids(messages, chat.tools)
            if isinstance(ids, Rejection):
                raise UserError(f"evaluation.prompts: {name} prompt {row + 1}: {ids.reason} ({ids.detail})")
            rows.append(row)
            prompts.append(Prompt(token_ids=tuple(ids), prompt_set=name, category=chat.category))
        return rows, prompts


def _stored_prompts(shards: tuple[str, ...], data: DataConfig, limit: int) -> list[Prompt]:
    """Return the prompts of the first `limit` validation samples, ordered by content digest."""
    store = open_store(shards, data)
    ordered = sorted((store.sample_id(int(row)), int(row)) for row in store.validation_indices)
    prompts = validation_prompts(store, [row for _, row in ordered], limit)
    if not prompts:
        raise UserError(
            "evaluation.prompts: there are no validation samples to take prompts from; allowed: prompt "
            f"files, or a data.validation_share above {data.validation_share}"
        )
    return prompts
