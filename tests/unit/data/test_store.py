"""The token store: samples are read as written, in an order and a split that depend on contents alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data import store as store_module
from dflash_core.data.store import TokenStore, open_store, read_manifest, validation_threshold
from dflash_core.errors import UserError
from tests.support.shards import numbered, write_shard


def test_samples_come_back_as_written(tmp_path: Path) -> None:
    samples = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]
    store = TokenStore.open([write_shard(tmp_path / "a", samples)])
    assert len(store) == 3
    assert store.lengths.tolist() == [3, 2, 4]
    assert store.num_supervised.tolist() == [2, 1, 3]
    assert store.num_eligible.tolist() == [1, 0, 2]
    assert [store.token_ids(i).tolist() for i in range(3)] == samples
    assert store.loss_mask(2).tolist() == [0, 1, 1, 1]
    dtypes = (store.lengths.dtype, store.num_eligible.dtype, store.source_id.dtype)
    assert dtypes == (np.int32, np.int32, np.int32)


def test_few_of_many_shards_are_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [write_shard(tmp_path / n, [[i, i + 1]], digest=n) for i, n in enumerate("abcdef", start=10)]
    expected = TokenStore.open(shards).gather([5, 0, 3, 0, 5])
    monkeypatch.setattr(store_module, "MOST_MAPPED", 2)
    store = TokenStore.open(shards)
    for given, array in zip(store.gather([5, 0, 3, 0, 5]), expected):
        assert given.tolist() == array.tolist()
    assert store._mapped.cache_info().currsize == 2
    assert sorted(int(store.token_ids(i)[0]) for i in range(6)) == list(range(10, 16))


def test_gather_concatenates_in_the_requested_order(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / name, [[n, n + 1, n + 2], [n + 50, n + 51]], digest=name)
        for n, name in [(10, "a"), (20, "b")]
    ]
    store = TokenStore.open(shards)
    token_ids, loss_mask, cu_seqlens = store.gather([3, 0, 2, 0])
    expected = [store.token_ids(i).tolist() for i in (3, 0, 2, 0)]
    assert token_ids.tolist() == sum(expected, [])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 11]
    assert loss_mask.tolist() == [0, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert (token_ids.dtype, loss_mask.dtype, cu_seqlens.dtype) == (np.int32, np.uint8, np.int64)
    assert store.gather([])[2].tolist() == [0]
    with pytest.raises(IndexError):
        store.gather([4])


def test_sample_ids_are_content_and_occurrence(tmp_path: Path) -> None:
    store = TokenStore.open([write_shard(tmp_path / "a", [[1, 2], [3, 4], [1, 2]])])
    content = np.array([1, 2], dtype="<i4").tobytes() + bytes([0, 1])

    def sample_id(occurrence: int) -> bytes:
        return hashlib.blake2b(content + occurrence.to_bytes(8, "little"), digest_size=16).digest()

    assert store.sample_id(0) == sample_id(0)
    assert store.sample_id(2) == sample_id(1)
    assert read_manifest(tmp_path / "a")["num_duplicates"] == 1


def test_order_is_by_digest_whatever_order_is_given(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / name, numbered(5, 100 * i), digest=name, source=name)
        for i, name in enumerate("xyz")
    ]
    one, other = TokenStore.open(shards), TokenStore.open(shards[::-1])
    assert one.digest == other.digest
    assert [m["digest"] for m in one.manifests] == sorted(m["digest"] for m in one.manifests)
    assert [one.token_ids(i).tolist() for i in range(15)] == [other.token_ids(i).tolist() for i in range(15)]
    assert one.sources == ["x", "y", "z"]
    names = [one.sources[one.source_id[i]] for i in range(15)]
    assert names == ["xyz"[one.token_ids(i)[0] // 100] for i in range(15)]
    assert one.row(7) == (one.manifests[1]["digest"], 2)


def test_a_shard_named_twice_is_opened_once(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / name, numbered(5)) for name in ("a", "b")]
    store = TokenStore.open(shards)
    assert len(store) == 5
    assert store.duplicate_shards == [shards[1]]


def test_split_threshold_doubles_until_enough() -> None:
    # Evenly spread: share s has 1000 s keys.
    keys = (np.arange(1000, dtype=np.float64) / 1000 * 2**64).astype(np.uint64)
    for share, minimum, expected in [(0.01, 5, 0.01), (0.01, 32, 0.04), (0.0, 32, 0.0), (0.1, 32, 0.1)]:
        assert validation_threshold(keys, share=share, minimum=minimum) == int(expected * 2**64)
    # 10 samples: a quarter of them is 2, which a share of 16% reaches.
    few = keys[::100]
    assert validation_threshold(few, share=0.01, minimum=32) == int(0.16 * 2**64)
    assert validation_threshold(keys[:0], share=0.01, minimum=32) == 0


def test_split_is_by_content(tmp_path: Path) -> None:
    repeated = numbered(400) + numbered(400)
    store = TokenStore.open([write_shard(tmp_path / "a", repeated)], validation_share=0.1)
    sides = [store.is_validation[i] for i in range(800)]
    assert sides[:400] == sides[400:]
    assert 40 <= len(store.validation_indices) <= 120
    assert sorted([*store.train_indices, *store.validation_indices]) == list(range(800))
    assert store.train_indices.dtype == np.int32

    more = TokenStore.open(
        [tmp_path / "a", write_shard(tmp_path / "b", numbered(400, 1000))], validation_share=0.1
    )
    side_of = {more.token_ids(i).tobytes(): bool(more.is_validation[i]) for i in range(len(more))}
    assert all(side_of[store.token_ids(i).tobytes()] == bool(store.is_validation[i]) for i in range(800))
    assert len(TokenStore.open([tmp_path / "a"], validation_share=0.0).validation_indices) == 0


def test_a_directory_that_is_not_a_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing-here"):
        TokenStore.open([tmp_path / "nothing-here"])
    with pytest.raises(UserError, match="no shards"):
        TokenStore.open([])
    shard = write_shard(tmp_path / "a", numbered(3))
    with open(shard / "tokens.bin", "ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="tokens.bin"):
        TokenStore.open([shard])


def test_repeats_are_counted_over_all_files(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / "a", [[1, 2], [1, 2], [3, 4]], digest="a"),
        write_shard(tmp_path / "b", [[3, 4]], digest="b"),
    ]
    assert TokenStore.open(shards).num_repeats == 2
    assert len(TokenStore.open(shards)) == 4


def test_a_store_of_a_configuration_has_its_split(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a", numbered(400))
    store = open_store([shard], DataConfig(validation_share=0.1, min_validation_samples=4))
    expected = TokenStore.open([shard], validation_share=0.1, min_validation_samples=4)
    assert store.digest == expected.digest
    assert store.validation_indices.tolist() == expected.validation_indices.tolist()


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("sequence_length", lambda v: v + 1),
        ("sequence_length", lambda v: -v),
        ("num_eligible_anchors", lambda v: v + 1000),
        ("num_supervised_tokens", lambda v: v - 1000),
        ("sequence_length", lambda v: v.astype(np.float64)),
    ],
)
def test_lengths_that_lead_outside_of_the_files_are_rejected(
    tmp_path: Path, column: str, change: Any
) -> None:
    path = write_shard(tmp_path / "a", numbered(4)) / "samples.parquet"
    table = pq.read_table(path)
    i = table.schema.get_field_index(column)
    pq.write_table(table.set_column(i, column, pa.array(change(table[column].to_numpy()))), path)
    with pytest.raises(UserError, match=r"(samples\.parquet|offsets\.npy): .*ingest the file again"):
        TokenStore.open([path.parent])


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 4, -4, 12, 16]),
        np.array([-4, 0, 4, 8, 12]),
        np.array([0, 1 << 40, 1 << 41, 1 << 42, 1 << 43]),
        np.array([0.0, 4.0, 8.0, 12.0, 16.0]),
        np.array([[0, 4], [8, 16]]),
        np.array([{"a": 1}], dtype=object),
    ],
)
def test_offsets_that_lead_outside_of_the_files_are_rejected(tmp_path: Path, offsets: Any) -> None:
    shard = write_shard(tmp_path / "a", numbered(4))
    np.save(shard / "offsets.npy", offsets, allow_pickle=True)
    with pytest.raises(UserError, match=r"offsets\.npy: .*ingest the file again"):
        TokenStore.open([shard])


@pytest.mark.parametrize("text", ["", "[]", "3", '{"format_version": 1}', "[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_rejected(tmp_path: Path, text: str) -> None:
    shard = write_shard(tmp_path / "a", numbered(4))
    (shard / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json: damaged .*ingest the file again"):
        TokenStore.open([shard])


def test_token_ids_outside_of_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    """An embedding would read beside its table, on a GPU without a message."""
    shard = write_shard(tmp_path / "a", numbered(4))
    assert len(TokenStore.open([shard], vocab_size=8).gather([0, 3])[0]) == 8
    store = TokenStore.open([shard], vocab_size=7)
    for read in (lambda: store.gather([0, 3]), lambda: store.token_ids(0)):
        with pytest.raises(UserError, match=r"tokens\.bin: sample 0 has the token id 7; allowed .*: 0 to 6"):
            read()
    tokens = np.fromfile(shard / "tokens.bin", dtype="<i4")
    tokens[-1] = -5
    tokens.tofile(shard / "tokens.bin")
    damaged = TokenStore.open([shard])
    assert len(damaged.gather([0, 1, 2])[0]) == 12
    with pytest.raises(UserError, match=r"sample 3 has the token id -5; .*Ingest the file again"):
        damaged.gather([1, 3])
