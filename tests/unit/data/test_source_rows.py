"""Rows with their format: blank lines, limits, and the columns that are read."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from dflash_core.config import DataConfig
from dflash_core.data import format_detection, formats, source_rows
from dflash_core.data.source_rows import open_rows
from tests.support.row_files import chat, ingest, lines


def test_blank_lines_do_not_hide_the_format(tmp_path: Path) -> None:
    manifest, _ = ingest(tmp_path / "x.jsonl", b"\n" * 300 + lines([chat("q", "yes")]))
    assert (manifest["num_blank"], manifest["num_samples"]) == (300, 1)


def test_limit_counts_rows_not_lines(tmp_path: Path) -> None:
    content = b"\n" + lines([chat("q1", "yes")]) + b"\n{\n" + lines([chat("q2", "yes"), chat("q3", "yes")])
    manifest, _ = ingest(tmp_path / "x.jsonl", content, limit=3)
    assert (manifest["num_rows"], manifest["num_samples"], manifest["num_rejected"]) == (3, 2, 1)


def test_blank_lines_before_the_first_rows_take_no_memory(tmp_path: Path) -> None:
    """They are all one object."""
    (tmp_path / "x.jsonl").write_bytes(b"\n" * 1000 + lines([chat("q", "yes")]) + b"\n" * 1000)
    rows = list(open_rows(tmp_path / "x.jsonl", DataConfig())[1])
    assert len({id(row) for row in rows}) == 2
    assert [(n, row.line) for n, row in enumerate(rows) if row.value is not None] == [(1000, 1001)]


def test_every_column_that_the_code_names_is_read() -> None:
    """Each text by which `row[...]` or `row.get(...)` is read in the formats and their detection."""
    names = set()
    for module in (formats, format_detection):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            key = None
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "row":
                key = node.slice
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "row.get":
                key = node.args[0]
            if isinstance(key, ast.Constant):
                names.add(key.value)
    assert {"tools", "rejection", "input_ids", "history"} <= names
    assert names <= source_rows.READ_COLUMNS
