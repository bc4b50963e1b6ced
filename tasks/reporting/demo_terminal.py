"""Two answers to one prompt in the terminal: without and with the drafter, accepted drafts in colour.

In a terminal both are replayed side by side at the pace at which each was decoded alone. Elsewhere they are
printed one after the other, accepted drafts in square brackets.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dflash_core.decoding.stream import StreamedAnswer, printable

FRAMES_PER_SECOND = 20
# Bold, so that drafts differ also where NO_COLOR is set.
DRAFT_STYLE = "bold green"
# Lines of the screen that the answers do not get: frames, figures, the prompt.
OTHER_LINES = 8


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both answers to a prompt."""

    prompt: str
    plain: StreamedAnswer
    speculative: StreamedAnswer
    block_size: int

    @property
    def speedup(self) -> float:
        return self.plain.seconds / self.speculative.seconds

    @property
    def is_same(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    def sides(self) -> list[tuple[str, StreamedAnswer]]:
        """Return both answers with their titles."""
        return [("plain", self.plain), ("speculative", self.speculative)]


def figures(answer: StreamedAnswer, seconds: float) -> str:
    """Return the figures of an answer, or of its first part, after so many seconds."""
    num_tokens = len(answer.token_ids)
    rate = num_tokens / seconds if seconds > 0 else 0.0
    line = f"{num_tokens} tokens, {seconds:.1f} s: {rate:.1f} tokens/s"
    if answer.drafted:
        line += f"; {answer.acceptance_length:.2f} tokens per step"
    return line


def verdict(comparison: Comparison) -> list[str]:
    """Return the result of a comparison, one line each for the speed, the drafts and the output."""
    plain, speculative = comparison.plain, comparison.speculative
    same = "the same tokens" if comparison.is_same else difference(comparison)
    return [
        f"plain {plain.tokens_per_second:.1f} tokens/s, speculative {speculative.tokens_per_second:.1f} "
        f"tokens/s: {comparison.speedup:.2f} times",
        f"acceptance length {speculative.acceptance_length:.2f} of at most {comparison.block_size}; "
        f"{speculative.accepted} of {speculative.drafted} drafts accepted",
        f"output: {same}",
    ]


def difference(comparison: Comparison) -> str:
    """Return where the two outputs part; sampling and near ties in bfloat16 do that."""
    pairs = zip(comparison.plain.token_ids, comparison.speculative.token_ids)
    place = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"different from token {place + 1} on (sampling, or a near tie of two tokens in bfloat16)"


def show(comparison: Comparison, console: Console, *, text_of_prompt: bool = True) -> None:
    """Show a comparison in the terminal, or print it where there is none."""
    if text_of_prompt:
        console.print(Text(printable(comparison.prompt), style="italic"))
    if console.is_terminal:
        _show_side_by_side(comparison, console)
    else:
        _print_in_turn(comparison, console)
    for line in verdict(comparison):
        console.print(Text(line))
    console.print()


def _show_side_by_side(
    comparison: Comparison,
    console: Console,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    end = max(answer.seconds for _, answer in comparison.sides())
    with Live(console=console, auto_refresh=False) as live:
        started = clock()
        while (seconds := clock() - started) < end:
            live.update(_frame(comparison, seconds, console), refresh=True)
            sleep(1 / FRAMES_PER_SECOND)
        live.update(_frame(comparison, end, console), refresh=True)


def _frame(comparison: Comparison, seconds: float, console: Console) -> RenderableType:
    """Return both answers as they were after so many seconds."""
    grid = Table.grid(expand=True, padding=(0, 1))
    height = max(4, console.height - OTHER_LINES)
    panels = []
    for title, answer in comparison.sides():
        grid.add_column(ratio=1)
        is_complete = seconds >= answer.seconds
        known = answer if is_complete else answer.after(seconds)
        text = _coloured(known)
        width = max(10, console.width // 2 - 5)
        lines = text.wrap(console, width)
        text = Text("\n").join(lines[-height:])
        subtitle = figures(known, min(seconds, answer.seconds))
        border = "green" if is_complete else "dim"
        panels.append(Panel(text, title=title, subtitle=subtitle, border_style=border, title_align="left"))
    grid.add_row(*panels)
    legend = Text.assemble(("accepted drafts look like ", "dim"), ("this", DRAFT_STYLE))
    return Group(legend, grid)


def _coloured(answer: StreamedAnswer) -> Text:
    text = Text()
    for step in answer.steps:
        for piece, is_draft in step.pieces:
            text.append(piece, style=DRAFT_STYLE if is_draft else None)
    return text


def _print_in_turn(comparison: Comparison, console: Console) -> None:
    for title, answer in comparison.sides():
        note = ", accepted drafts in [brackets]" if answer.drafted else ""
        console.print(Text(f"{title}: {figures(answer, answer.seconds)}{note}"))
        console.print(Text(_bracketed(answer)), soft_wrap=True)
        console.print()


def _bracketed(answer: StreamedAnswer) -> str:
    """Return the text with each run of accepted drafts in brackets."""
    pieces = [piece for step in answer.steps for piece in step.pieces]
    runs: Sequence[tuple[bool, str]] = [
        (is_draft, "".join(text for text, _ in group))
        for is_draft, group in itertools.groupby(pieces, key=lambda piece: piece[1])
    ]
    return "".join(f"[{text}]" if is_draft else text for is_draft, text in runs)
