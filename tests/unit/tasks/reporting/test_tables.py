"""Figures as text, tables as Markdown."""

from __future__ import annotations

import pytest

from tasks.reporting import tables


def test_bars_within_cells_are_escaped() -> None:
    table = tables.markdown_table(["reason", "rows"], [["unknown role '<|user|>'", "3"]])
    assert table.splitlines()[2] == "| unknown role '\\<\\|user\\|>' | 3 |"


def test_cells_of_strangers_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Categories of prompt files and names of data files are printed and published."""
    cell = "[/b] ![x](/etc/passwd)\x1b[2J\nnext"
    tables.print_table("[/i]", [(cell, "3")])
    tables.print_wide_table("[/i]", [cell], [[cell]])
    printed = capsys.readouterr().out
    assert "[/b] ![x](/etc/passwd)" in printed
    assert "\x1b" not in printed
    row = tables.markdown_table(["a", "b"], [[cell, "x" * 9000]]).splitlines()[2]
    assert row.startswith("| \\[/b] !\\[x](/etc/passwd) \\[2J next | xxx")
    assert len(row) < 2100


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
