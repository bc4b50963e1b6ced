"""Answers of the target itself: many conversations decoded together, greedily or by sampling.

An answer depends only on its prompt and the settings, not on what else is in the batch. Prompts that leave no
room for an answer are rejected with a reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from dflash_core.config import RegenerateConfig
from dflash_core.data.answers import LENGTH, Answer, Request
from dflash_core.data.chat import Rejection
from dflash_core.decoding.acceptance import Generation
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_answers
from dflash_core.target.target import Target


class BatchDecoder:
    """The local generator (see `dflash_core.data.answers.Generator`).

    `batch_size` prompts are decoded at the same time, longest first, so out-of-memory shows immediately and
    neighbouring rows have similar lengths. A finished answer is yielded at once and its slot goes to the next
    prompt. Random numbers come from a stream named by the request's key, so an answer does not depend on what
    else is in the batch.

    Args:
        target: the loaded target, after `Target.end_answers`; the layers it captures do not matter.
        tokenizer: the target's own.
        config: sampling and `batch_size`.
        model: name and fingerprint of the target, for `identity`.
    """

    def __init__(
        self, target: Target, tokenizer: Any, config: RegenerateConfig, model: dict[str, str]
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.sampling = Sampling(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=config.seed,
            batch_size=config.batch_size,
        )
        self.identity: dict[str, Any] = {
            **model,
            "temperature": config.temperature,
            "seed": config.seed,
            "max_tokens": config.max_new_tokens,
        }
        if target.added_eos_ids:
            self.identity["end_ids"] = list(target.eos_ids)

    def answers(self, pending: deque[Request]) -> Iterator[tuple[Request, Answer | Rejection]]:
        """Yield answers as they are completed; requests added to `pending` meanwhile form the next round."""
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
            if fitting:
                prompts = [Prompt(token_ids=tuple(request.token_ids)) for request in fitting]
                numbers = [int(request.key[:12], 16) for request in fitting]
                for i, generation in plain_answers(self.target, prompts, self.sampling, numbers=numbers):
                    yield fitting[i], self._answer(generation)

    def _answer(self, generation: Generation) -> Answer:
        """Return the tokens and their text, without an incomplete UTF-8 character at the token limit."""
        text, is_cut = answer_text(self.tokenizer, generation), generation.finished == LENGTH
        message = {"role": "assistant", "content": text.rstrip("\ufffd") if is_cut else text}
        token_ids = list(generation.token_ids)
        return Answer(message, LENGTH if is_cut else "stop", len(token_ids), token_ids)


def answer_text(tokenizer: Any, generation: Generation) -> str:
    """Return an answer's text: without its end token, which need not be special, and special tokens."""
    is_ended = generation.finished == "end"
    token_ids = generation.token_ids[:-1] if is_ended else generation.token_ids
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
