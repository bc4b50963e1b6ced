"""Shards: complete or absent, with every rejected row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash_core.data.shard_writer import ShardWriter
from dflash_core.data.store import TokenStore
from tests.support.shards import numbered, write_shard


def test_nothing_is_visible_before_close(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path / "a", source_digest="d", meta={}) as writer:
        writer.add(np.array([1, 2], dtype=np.int32), np.array([1, 1], dtype=np.uint8), source="s")
        assert not (tmp_path / "a").exists()
        raise RuntimeError("stopped")
    assert list(tmp_path.iterdir()) == []


def test_a_second_shard_replaces_the_first(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", numbered(3))
    write_shard(tmp_path / "a", numbered(2))
    assert len(TokenStore.open([tmp_path / "a"])) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_rejects_are_kept_with_place_and_reason(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a", source_digest="d", meta={}) as writer:
        writer.reject(3, "invalid JSON", "Expecting value")
        writer.reject(9, "invalid JSON", "lone \ud800")
        writer.reject(1, "no role", "turn 0", element=501)
        writer.reject(None, "no role", element=7)
        manifest = writer.close()
    table = pq.read_table(tmp_path / "a" / "rejects.parquet").to_pylist()
    assert table == [
        {"line": 3, "element": None, "reason": "invalid JSON", "detail": "Expecting value"},
        {"line": 9, "element": None, "reason": "invalid JSON", "detail": "lone ?"},
        {"line": 1, "element": 501, "reason": "no role", "detail": "turn 0"},
        {"line": None, "element": 7, "reason": "no role", "detail": ""},
    ]
    assert manifest["rejects"] == {"invalid JSON": 2, "no role": 2}
    assert manifest["reject_examples"]["no role"] == ["line 1, element 501: turn 0", "row 7"]
    assert manifest["num_samples"] == 0
    assert len(TokenStore.open([tmp_path / "a"])) == 0
