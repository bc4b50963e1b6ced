"""Headers of turns: the generation prompts of a template, and the parts of them that its turns share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_core.data.reasoning_blocks import last_block
from dflash_core.data.text_prefixes import num_equal_tags, skip_blanks


@dataclass(frozen=True)
class PromptHeaders:
    """What a template writes before a turn.

    Args:
        headers: generation prompts, and their parts that turns share, longest first.
        tails: ends of generation prompts that some turns lack, e.g. an opened reasoning block.
    """

    headers: tuple[str, ...] = ()
    tails: tuple[str, ...] = ()

    @classmethod
    def of_template(cls, prompts: Iterable[str], turns: Sequence[str]) -> PromptHeaders:
        """Compare generation prompts with the texts of turns, both without the messages before them."""
        headers, tails = set(), set()
        for prompt in prompts:
            shared = [num_equal_tags(prompt, turn) for turn in turns]
            for length in (*shared, last_block(prompt), len(prompt)):
                if prompt[:length].strip():
                    headers.add(prompt[:length])
                    tails.add(prompt[length:])
        return cls(tuple(sorted(headers, key=len, reverse=True)), tuple(sorted(tails - {""})))

    def behind_prompt(self, text: str, prompts: Sequence[str]) -> tuple[int, bool]:
        """Return the end of the longest prompt that `text` starts with, and False.

        If there is none, return the end of the longest prompt without its tail, and True; else -1.
        """
        if whole := [len(prompt) for prompt in prompts if text.startswith(prompt)]:
            return max(whole), False
        shorter = [p.removesuffix(tail) for p in prompts for tail in self.tails if p.endswith(tail)]
        return max((len(p) for p in shorter if text.startswith(p)), default=-1), True

    def behind_header(self, text: str, start: int) -> int:
        """Return the end of the header at `start`; `start` if there is none, or one ends there.

        Templates write no generation prompt behind an assistant's turn: the header of a second one in a row
        then follows the prompt.
        """
        if not self.headers or text.endswith(self.headers, 0, start):
            return start
        position = skip_blanks(text, start)
        shown = (header.lstrip() for header in self.headers)
        return next((position + len(h) for h in shown if text.startswith(h, position)), start)
