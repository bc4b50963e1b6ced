"""Rows of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data import raw_rows
from dflash_core.data.chat import Rejection
from dflash_core.data.containers import read_rows
from dflash_core.data.ingest import ingest_file
from dflash_core.data.source_rows import open_rows
from dflash_core.errors import UserError
from tests.support.chat_families import small_tokenizer
from tests.support.row_files import chat


def reasons_of(rows: list[tuple[Any, Any]]) -> list[tuple[Any, str]]:
    return [(number, value.reason) for number, value in rows if isinstance(value, Rejection)]


def ingest(path: Path, **settings: Any) -> dict[str, Any]:
    return ingest_file(
        path, DataConfig(**settings), small_tokenizer(), path.with_suffix(".s"), mask_token_id=None
    )


def test_parquet_of_large_types_and_structs(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    turns = [[{"role": "user", "content": f"q{n}"}] for n in range(1000)]
    table = pa.table({"messages": pa.array(turns, pa.large_list(turn)), "n": pa.array(range(1000))})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=300)
    rows = [(row.element, row.value) for row in read_rows(tmp_path / "x.parquet")]
    assert rows == [(n + 1, {"messages": turns[n], "n": n}) for n in range(1000)]


def test_nulls_added_by_arrow_are_removed(tmp_path: Path) -> None:
    """Parquet has one schema for all rows: each call would get the arguments of every other call."""
    calls = [
        [{"name": "f", "arguments": {"x": 1}}],
        [{"name": "g", "arguments": {"y": [{"z": "s"}, {"w": 2}]}}],
    ]
    rows = [{"messages": [{"role": "assistant", "content": None, "tool_calls": call}]} for call in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [row.value for row in read_rows(tmp_path / "x.parquet")] == rows


def test_invalid_utf8_in_parquet_rejects_its_row(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0")
    bad = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"text": bad}), tmp_path / "x.parquet")
    rows = [(row.element, row.value) for row in read_rows(tmp_path / "x.parquet")]
    assert [rows[0], rows[2]] == [(1, {"text": "a"}), (3, {"text": "b"})]
    assert reasons_of(rows) == [(2, "invalid UTF-8")]


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "whole.parquet")
    path = tmp_path / "cut.parquet"
    path.write_bytes((tmp_path / "whole.parquet").read_bytes()[:500])
    with pytest.raises(UserError, match="cut.parquet.*Parquet"):
        list(read_rows(path))


def test_a_parquet_column_that_no_format_reads_is_not_read(tmp_path: Path) -> None:
    """2**60 microseconds are no date in Python, and Mars/Olympus is no time zone."""
    values = [chat(f"q{n}", "yes") for n in range(3)]
    table = pa.Table.from_pylist(values)
    table = table.append_column("when", pa.array([2**60] * 3, pa.timestamp("us")))
    table = table.append_column("zone", pa.array([0] * 3, pa.timestamp("us", tz="Mars/Olympus")))
    table = table.append_column("text", pa.array(["x"] * 3))
    pq.write_table(table, tmp_path / "x.parquet")
    manifest = ingest(tmp_path / "x.parquet", max_reject_share=0.0)
    assert manifest["num_samples"] == 3
    for row in open_rows(tmp_path / "x.parquet", DataConfig())[1]:
        assert (row.value["when"], row.value["zone"], row.value["text"]) == (None, None, None)
    # Regeneration keeps columns of plain values.
    for row in open_rows(tmp_path / "x.parquet", DataConfig(), answered=False)[1]:
        assert (row.value["when"], row.value["zone"], row.value["text"]) == (None, None, "x")
    pq.write_table(table.select(["when", "text"]), tmp_path / "y.parquet")
    with pytest.raises(UserError, match="no known format; columns seen: when, text"):
        ingest(tmp_path / "y.parquet")
    with pytest.raises(UserError, match="no conversation .row 1: columns: when, zone, text"):
        pq.write_table(table.select(["when", "zone", "text"]), tmp_path / "z.parquet")
        ingest(tmp_path / "z.parquet", format="messages")


def test_columns_of_other_names_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"task": ["q"] * 2, "code": ["yes"] * 2}), tmp_path / "x.parquet")
    columns = {"instruction": "task", "output": "code"}
    assert ingest(tmp_path / "x.parquet", columns=columns)["num_samples"] == 2


def test_times_inside_of_turns_are_not_read(tmp_path: Path) -> None:
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
    turns = [{"role": "user", "content": "q", "at": 2**60}, {"role": "assistant", "content": "yes", "at": 0}]
    pq.write_table(pa.table({"messages": pa.array([turns], pa.list_(turn))}), tmp_path / "x.parquet")
    assert ingest(tmp_path / "x.parquet")["num_samples"] == 1
    [row] = read_rows(tmp_path / "x.parquet")
    assert row.value == chat("q", "yes")


def test_maps_dictionaries_and_dotted_names_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "map": pa.array([[("x", 1)], []], pa.map_(pa.string(), pa.int64())),
            "a.b": pa.array([1, 2]),
            "when": pa.array([0, 1], pa.date32()),
            "pair": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    first, _ = read_rows(tmp_path / "x.parquet")
    assert first.value == {"kind": "a", "map": [("x", 1)], "a.b": 1, "when": None, "pair": [1, 2]}


def test_a_row_beyond_the_limit_is_rejected_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_rows, "MAX_ROW_BYTES", 1000)
    texts = ["a", "x" * 2000, "b", "y" * 900, "c"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    rows = [(row.element, row.value) for row in read_rows(tmp_path / "x.parquet")]
    assert [value["text"] for _, value in rows if isinstance(value, dict)] == ["a", "b", "y" * 900, "c"]
    assert reasons_of(rows) == [(2, "row too large")]


def test_columns_of_one_name_fail_the_file_where_they_are_read(tmp_path: Path) -> None:
    columns = [pa.array(["q"]), pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.table(columns, names=["prompt", "response", "response"]), tmp_path / "x.parquet")
    with pytest.raises(UserError, match="has several columns named 'response'; allowed: one column per name"):
        list(read_rows(tmp_path / "x.parquet"))
    assert len(list(read_rows(tmp_path / "x.parquet", columns={"prompt"}))) == 1


def test_pages_are_checked_by_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"prompt": [f"question {n}" for n in range(50)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"question 7", b"question x", 1))
    with pytest.raises(UserError, match="has a damaged Parquet page after row 0: .*checksum"):
        list(read_rows(path))
