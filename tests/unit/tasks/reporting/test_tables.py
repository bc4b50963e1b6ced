"""Figures as text, tables as Markdown."""

from __future__ import annotations

import pytest

from tasks.reporting import tables


def test_bars_within_cells_are_escaped() -> None:
    table = tables.markdown_table(["reason", "rows"], [["unknown role '<|user|>'", "3"]])
    assert table.splitlines()[2] == "| unknown role '<\\|user\\|>' | 3 |"


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (True, "yes"),
        (0.12345, "0.123"),
        (12345.6, "12,346"),
        (1234, "1,234"),
        ([1.0, 2.0], "1.000 to 2.000"),
    ],
)
def test_figures_as_text(value: object, text: str) -> None:
    assert tables.show(value) == text
