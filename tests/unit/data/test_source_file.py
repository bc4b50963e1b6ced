"""The bytes of a file are those of its digest, or none of its rows are kept."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.data import ingest as ingest_module
from dflash_core.data import raw_rows
from dflash_core.data.ingest import ingest_file
from dflash_core.data.source_file import SourceFile
from dflash_core.errors import UserError
from tests.support.chat_families import small_tokenizer
from tests.support.row_files import chat, write_rows


@pytest.mark.parametrize("kind", ["appended", "truncated", "rewritten", "replaced"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.parquet"])
def test_the_rows_kept_are_those_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """The file changes after its digest was taken and its first rows were read."""
    generator = random.Random(0)
    # Text that gzip cannot make much smaller.
    rows = [chat(f"question {n}", f"yes {generator.randbytes(20).hex()}") for n in range(600)]
    path, digest = write_rows(tmp_path / name, rows)
    content, changed = path.read_bytes(), False

    def change(num_rows: int) -> None:
        nonlocal changed
        if changed:
            return
        changed = True
        if kind == "replaced":
            other, _ = write_rows(tmp_path / f"other.{name}", rows[:50])
            other.rename(path)
        elif kind == "appended":
            with path.open("ab") as file:
                file.write(content[-1000:])
        else:
            size = len(content) // 2
            os.truncate(path, size)
            if kind == "rewritten":
                # Of the same size, with other bytes at the end.
                path.write_bytes(content[:-100] + content[-200:-100])

    def run() -> dict[str, Any]:
        config, out = DataConfig(max_reject_share=1.0), tmp_path / "shard"
        keywords: dict[str, Any] = {"mask_token_id": None, "digest": digest, "progress": change}
        return ingest_file(path, config, small_tokenizer(), out, **keywords)

    monkeypatch.setattr(ingest_module, "_BATCH_ROWS", 16)
    monkeypatch.setattr(raw_rows, "CHUNK_BYTES", 1 << 12)
    # From Python 3.12 on, 128 KiB: the whole file.
    monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", 1 << 12, raising=False)
    if kind == "replaced":
        # The open file is still the old one.
        assert run()["num_samples"] == 600
        with pytest.raises(UserError, match=f"{name}' changed while it was read"):
            run()
        return
    with pytest.raises(UserError, match=f"{name}' changed while it was read"):
        run()
    assert changed
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_limit_of_rows_still_checks_the_digest(tmp_path: Path) -> None:
    path, digest = write_rows(tmp_path / "x.jsonl", [chat("q", "yes")] * 100)
    config = DataConfig(limit=3)
    arguments: dict[str, Any] = {"mask_token_id": None, "digest": digest}
    assert ingest_file(path, config, small_tokenizer(), tmp_path / "s", **arguments)["num_rows"] == 3
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(UserError, match="x.jsonl' changed while it was read"):
        ingest_file(path, config, small_tokenizer(), tmp_path / "s", **arguments)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.files: .*none.jsonl' cannot be read: .*No such file"):
        SourceFile(tmp_path / "none.jsonl")


def test_without_a_digest_nothing_is_checked(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"one")
    with SourceFile(tmp_path / "x") as source:
        (tmp_path / "x").write_bytes(b"two")
        source.verify()
    with SourceFile(tmp_path / "x", "0" * 64) as source, pytest.raises(UserError, match="changed"):
        source.verify()
