"""Comparisons of the demo as one self-contained HTML page, readable without JavaScript.

The text itself holds the measurement: each step of an answer is an element with its seconds and tokens, which
the script of the page (`demo_page.html`) hides and shows again at their pace.
"""

from __future__ import annotations

import html
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dflash_core.decoding.stream import Step, StreamedAnswer, printable
from dflash_core.files import complete_file
from tasks.reporting.demo_terminal import Comparison, difference, figures

TEMPLATE = Path(__file__).with_name("demo_page.html")


def write_page(path: Path, comparisons: Sequence[Comparison], *, title: str, about: str) -> None:
    """Write the page, complete or not at all."""
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(title),
        about=html.escape(about),
        sections="\n".join(_section(comparison) for comparison in comparisons),
    )
    with complete_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _section(comparison: Comparison) -> str:
    speedup = comparison.speedup
    same = "The same tokens." if comparison.is_same else f"{difference(comparison).capitalize()}."
    slowest = max(answer.seconds for _, answer in comparison.sides())
    sides = "".join(_side(title, answer, slowest) for title, answer in comparison.sides())
    return (
        f'<section class="{"faster" if speedup > 1 else "slower"}">'
        f'<div class="head"><div class="speedup">{speedup:.2f} times</div>'
        f"<div><h2>as fast with the drafter</h2>"
        f'<p class="figures">{html.escape(same)}</p></div><button hidden>Replay</button></div>'
        f'<div class="prompt">{html.escape(printable(comparison.prompt))}</div>'
        f'<div class="sides">{sides}</div>{_steps_table(comparison)}</section>'
    )


def _side(title: str, answer: StreamedAnswer, slowest: float) -> str:
    """Return one answer; the bar is the share of the time that the slower one takes."""
    width = 100 * answer.seconds / slowest if slowest else 0.0
    return (
        f'<div class="side {title}"><div><h2>{title}</h2>'
        f'<span class="rate">{answer.tokens_per_second:.1f} tokens/s</span></div>'
        f'<div class="bar"><div style="width:{width:.1f}%"></div></div>'
        f'<div class="answer">{"".join(_step(step) for step in answer.steps)}</div>'
        f'<p class="figures">{html.escape(figures(answer, answer.seconds))}</p></div>'
    )


def _step(step: Step) -> str:
    pieces = "".join(
        f"<b>{html.escape(text)}</b>" if is_draft else html.escape(text) for text, is_draft in step.pieces
    )
    measured = f'data-seconds="{step.seconds:.5f}" data-tokens="{step.num_tokens}"'
    return f'<span class="step" {measured}>{pieces}</span>'


def _steps_table(comparison: Comparison) -> str:
    """Return how many steps accepted so many drafts."""
    counts = Counter(step.accepted for step in comparison.speculative.steps[1:])
    numbers = range(comparison.block_size)
    return (
        f"<table><tr><th>drafts accepted in a step</th>{_cells(list(numbers))}</tr>"
        f"<tr><th>steps</th>{_cells([counts[number] for number in numbers])}</tr></table>"
    )


def _cells(values: Sequence[int]) -> str:
    return "".join(f"<td>{value}</td>" for value in values)
