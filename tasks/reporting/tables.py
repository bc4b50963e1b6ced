"""Figures as text, and tables for the terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# Longer cells are cut.
MOST_CHARACTERS = 2000


def plain(text: str) -> str:
    """Return a cell's text on one line and without control characters: files of strangers name categories."""
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return "".join(c if c.isprintable() else " " for c in cut)


def _console(**options: Any) -> Console:
    # Brackets in a cell are no markup.
    return Console(markup=False, emoji=False, **options)


def show(value: Any, digits: int = 3) -> str:
    """Return a figure as text; `-` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return " to ".join(show(v, digits) for v in value)
    return str(value)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print two columns in the terminal."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    _console().print(table)


def print_wide_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a header; outside a terminal (a log) it is 200 columns wide."""
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(plain(name), overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    console = _console()
    if not console.is_terminal:
        console = _console(width=200)
    console.print(table)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; within cells, bars, tags, links and images are escaped."""
    escaped = [[re.sub(r"([|<\[])", r"\\\1", plain(cell)) for cell in line] for line in (header, *rows)]
    lines = [escaped[0], ["---"] * len(header), *escaped[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
