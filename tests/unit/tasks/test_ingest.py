"""The files of an ingest: digests by content, also of data sets on the Hub."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data.ingest import ingest_file
from tasks.ingest import find_sources
from tasks.storage.file_digests import FileDigests
from tests.support.chat_families import MASK_TOKEN_ID, small_tokenizer
from tests.support.hub_stub import StubDataset, stub_hub


def parquet(answer: str) -> bytes:
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}] * 2
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def test_a_data_set_of_the_hub_is_a_source_whose_digest_follows_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch, file = "refs/convert/parquet", "default/train/0000.parquet"
    data = DataConfig(files=("hf://datasets/owner/chats?split=train",))
    with stub_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        dataset = hub.datasets["owner/chats"] = StubDataset({branch: {file: parquet("yes one")}})
        said: list[str] = []
        (first,) = find_sources(data, FileDigests(tmp_path), said.append)
        dataset.branches[branch]["README.md"] = b"corrected"
        (same,) = find_sources(data, FileDigests(tmp_path), said.append)
        dataset.branches[branch][file] = parquet("yes two")
        (moved,) = find_sources(data, FileDigests(tmp_path), said.append)
    assert first.name == "chats-default-train-0000.parquet"
    assert first.path != same.path
    assert first.digest == same.digest
    assert first.digest != moved.digest
    # A line before each download, and one after it.
    assert len(said) == 6
    manifest = ingest_file(
        moved.path, DataConfig(), small_tokenizer(), tmp_path / "shard", mask_token_id=MASK_TOKEN_ID
    )
    assert (manifest["num_samples"], manifest["num_rejected"]) == (2, 0)
    assert manifest["meta"]["source"] == "chats-default-train-0000"
