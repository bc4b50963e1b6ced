"""Tables as Markdown."""

from __future__ import annotations

from tasks.reporting import tables


def test_bars_within_cells_are_escaped() -> None:
    table = tables.markdown_table(["reason", "rows"], [["unknown role '<|user|>'", "3"]])
    assert table.splitlines()[2] == "| unknown role '<\\|user\\|>' | 3 |"
