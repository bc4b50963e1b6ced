"""One answer as a stream of steps: the text of each, its drafts that were accepted, and its measured seconds.

Plain and speculative decoding of one prompt give answers of the same shape, so that they can be shown side by
side. Each decodes alone, and what happens between two steps (detokenisation, display) is not measured.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_core.decoding.acceptance import Generation
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_steps, speculative_steps
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.target import Target

REPLACEMENT = "\ufffd"
# Characters that join others into one, as in emoji: they control nothing.
JOINERS = "\u200c\u200d"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step emitted; the first one is the prefill."""

    seconds: float
    # (text, whether it is an accepted draft), one entry per token that completes a character
    pieces: tuple[tuple[str, bool], ...]
    num_tokens: int
    # drafts accepted, and those that could have been
    accepted: int
    drafted: int


@dataclass
class StreamedAnswer:
    """An answer and its steps."""

    steps: list[Step] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def text(self) -> str:
        return "".join(text for step in self.steps for text, _ in step.pieces)

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def drafted(self) -> int:
        return sum(step.drafted for step in self.steps)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step of the target; 1 for plain decoding."""
        later = self.steps[1:]
        return sum(step.num_tokens for step in later) / len(later) if later else 1.0

    def after(self, seconds: float) -> StreamedAnswer:
        """Return the part that was known so many seconds after the start."""
        known, end = StreamedAnswer(), 0.0
        for step in self.steps:
            end += step.seconds
            if end > seconds:
                break
            known.steps.append(step)
            known.token_ids += self.token_ids[len(known.token_ids) :][: step.num_tokens]
        return known


class TextStream:
    """Text from tokens, one by one: a token alone may be a part of a character, or of a space."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from `_start` on are decoded again as the context of new ones; those before `_shown` are out.
        self._start = self._shown = 0

    def add(self, token_id: int) -> str:
        """Return the text that a token completes, control characters escaped; "" within a character."""
        self._ids.append(token_id)
        before, whole = (
            self._decode(self._ids[self._start : self._shown]),
            self._decode(self._ids[self._start :]),
        )
        if whole.endswith(REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return printable(whole[len(before) :])

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def printable(text: str) -> str:
    """Return text with the characters that control a terminal, or the direction of writing, as escapes."""
    return "".join(character if _is_harmless(character) else _escaped(character) for character in text)


def _is_harmless(character: str) -> bool:
    return character in "\n\t" + JOINERS or unicodedata.category(character) not in (
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def decode_both(
    target: Target, drafter: DFlashDrafter, tokenizer: Any, prompt: Prompt, sampling: Sampling
) -> tuple[StreamedAnswer, StreamedAnswer]:
    """Return the answers to one prompt, decoded without and with the drafter, one after the other."""
    plain = StreamedAnswer()
    for _ in stream_into(plain, plain_steps(target, [prompt], sampling), tokenizer, target.eos_ids):
        pass
    speculative = StreamedAnswer()
    steps = speculative_steps(target, drafter, [prompt], sampling)
    for _ in stream_into(speculative, steps, tokenizer, target.eos_ids):
        pass
    return plain, speculative


def stream_into(
    answer: StreamedAnswer,
    generations: Iterator[Sequence[Generation]],
    tokenizer: Any,
    eos_ids: Sequence[int],
) -> Iterator[Step]:
    """Yield the steps of one prompt's decoding, and add each to the answer."""
    text = TextStream(tokenizer)
    started = time.perf_counter()
    for (generation,) in generations:
        seconds = time.perf_counter() - started
        new = generation.token_ids[len(answer.token_ids) :]
        # The prefill and plain decoding have no drafts.
        is_step = bool(generation.accepted) and bool(answer.steps)
        accepted, drafted = (generation.accepted[-1], generation.drafted[-1]) if is_step else (0, 0)
        pieces = [
            (text.add(token), place < accepted) for place, token in enumerate(new) if token not in eos_ids
        ]
        step = Step(
            seconds=seconds,
            pieces=tuple(piece for piece in pieces if piece[0]),
            num_tokens=len(new),
            accepted=accepted,
            drafted=drafted,
        )
        answer.steps.append(step)
        answer.token_ids += new
        yield step
        started = time.perf_counter()
