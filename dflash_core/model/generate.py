"""Answers of the target itself: conversations of similar length decoded together, greedily or by sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from dflash_core.config import RegenerateConfig
from dflash_core.data.answers import LENGTH, Answer, Request
from dflash_core.data.chat import Rejection
from dflash_core.model.acceptance import Generation
from dflash_core.model.speculate import Prompt, Sampling, plain_decode
from dflash_core.model.target import Target


class BatchDecoder:
    """The local generator (see `dflash_core.data.answers.Generator`).

    Batches hold prompts of similar length, longest first: what does not fit into memory shows at once. Random
    numbers come from a stream named by the request's key, so an answer does not depend on its batch.

    Args:
        target: loaded, with any layer to capture.
        tokenizer: its own.
        config: sampling and `batch_size`.
        model: name and fingerprint of the target, for `identity`.
    """

    def __init__(
        self, target: Target, tokenizer: Any, config: RegenerateConfig, model: dict[str, str]
    ) -> None:
        self.target, self.tokenizer, self.batch_size = target, tokenizer, config.batch_size
        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=config.seed,
            batch_size=config.batch_size,
        )
        self.identity = {
            **model,
            "temperature": config.temperature,
            "seed": config.seed,
            "max_tokens": config.max_new_tokens,
        }

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """A batch at a time."""
        limit = getattr(self.target.config, "max_position_embeddings", None)
        while pending:
            requests = sorted(pending, key=lambda request: len(request.token_ids), reverse=True)
            pending.clear()
            fitting = []
            for request in requests:
                length = len(request.token_ids)
                if limit is None or length + self.sampling.max_new_tokens <= limit:
                    fitting.append(request)
                    continue
                detail = f"{length} tokens and {self.sampling.max_new_tokens} new ones; positions: {limit}"
                yield request, Rejection("prompt leaves no room for an answer", detail)
            for first in range(0, len(fitting), self.batch_size):
                batch = fitting[first : first + self.batch_size]
                prompts = [Prompt(token_ids=tuple(request.token_ids)) for request in batch]
                numbers = [int(request.key[:12], 16) for request in batch]
                decoded = plain_decode(self.target, prompts, self.sampling, numbers=numbers)
                for request, generation in zip(batch, decoded.generations, strict=True):
                    yield request, self._answer(generation)

    def _answer(self, generation: Generation) -> Answer:
        """Tokens as text; a character of which the limit cut off the rest is left out."""
        text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        is_cut = generation.finished == LENGTH
        text = text.rstrip("\ufffd") if is_cut else text
        message = {"role": "assistant", "content": text}
        return Answer(message, LENGTH if is_cut else "stop", len(generation.token_ids))
