"""The token store: what ingest writes and training reads.

One file of conversations becomes one shard, a directory that appears whole or not at all:

    tokens.bin        int32, all samples one after another
    loss_mask.bin     uint8, the same positions: 1 where the token is supervised
    offsets.npy       int64 [n + 1], sample i is rows offsets[i] to offsets[i + 1]
    samples.parquet   one row a sample: sample_id, source, lengths, counts, is_validation, validation_key
    rejects.parquet   one row a refused row of the source: line, reason, detail
    manifest.json     counts and digests, written last

`TokenStore` opens shards in one global order (by digest, then row), so the order in which files are named
changes nothing. Both big files are memory maps shared by all ranks of a machine: a random microbatch of
49,152 tokens costs a few hundred microseconds (`benchmarks/feed.py`), and the resident part is the page
cache's business.

Shape letters: S tokens of one sample, T tokens of a microbatch, N samples of a store, n samples of a
microbatch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from dflash_core.anchors import eligible_positions
from dflash_core.errors import UserError

FORMAT_VERSION = 1
_KEY_RANGE = 1 << 64
SAMPLES_SCHEMA = pa.schema(
    [
        ("sample_id", pa.binary(16)),
        ("source", pa.string()),
        ("sequence_length", pa.int32()),
        ("num_supervised_tokens", pa.int32()),
        ("num_eligible_anchors", pa.int32()),
        ("is_validation", pa.bool_()),
        ("validation_key", pa.uint64()),
    ]
)
_REJECTS_SCHEMA = pa.schema([("line", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])


def validation_threshold(keys: ArrayLike, *, share: float, minimum: int) -> int:
    """A sample is a validation sample when its validation key (uint64 of its content) is below this number.

    The share is doubled until at least `minimum` samples fall below it, or a quarter of all samples where
    there are fewer than 4 x minimum, and never exceeds one half. So the rule is exact, depends on contents
    alone, and adding files moves it only when the data becomes large enough for a smaller share.

    Args:
        keys: uint64 [N], the validation keys of all samples.
        share: wished share of validation samples, 0 to below 1; 0 means no validation samples.
        minimum: wished least number of them.

    Example: 1,000 samples, share 0.01, minimum 32: about 10 fall below 1%, about 20 below 2%, about 40 below
    4%: 4%.
    """
    keys = np.asarray(keys, dtype=np.uint64)
    if share <= 0 or len(keys) == 0:
        return 0
    wanted = min(minimum, len(keys) // 4)
    while share < 0.5 and np.count_nonzero(keys < np.uint64(int(share * _KEY_RANGE))) < wanted:
        share = min(0.5, 2 * share)
    return int(share * _KEY_RANGE)


class ShardWriter:
    """Writes one shard. Nothing is visible under `directory` before `close`; use as a context manager.

    Args:
        directory: final name of the shard. An older shard there is replaced at `close`.
        source_digest: digest of everything the shard was made from; part of the shard's digest.
        meta: JSON values kept in the manifest as they are.
        validation_share: share of the key range whose samples are marked `is_validation` in samples.parquet.
            A store raises it where it holds few samples, see `validation_threshold`.
    """

    def __init__(
        self, directory: Path, *, source_digest: str, meta: dict[str, Any], validation_share: float = 0.01
    ) -> None:
        self.directory = Path(directory)
        self.source_digest = source_digest
        self.meta = meta
        self.notes: Counter[str] = Counter()  # counted remarks that refuse nothing
        self.num_rows = 0  # rows of the source; blank lines are not rows
        self.num_blank = 0
        self._validation_bound = int(validation_share * _KEY_RANGE)
        self._temporary = self.directory.with_name(f".{self.directory.name}.{os.getpid()}.partial")
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._tokens: BinaryIO = open(self._temporary / "tokens.bin", "wb", buffering=1 << 20)  # noqa: SIM115
        self._masks: BinaryIO = open(self._temporary / "loss_mask.bin", "wb", buffering=1 << 20)  # noqa: SIM115
        self._samples = _Rows(self._temporary / "samples.parquet", SAMPLES_SCHEMA)
        self._rejects = _Rows(self._temporary / "rejects.parquet", _REJECTS_SCHEMA)
        self._digest = hashlib.blake2b(f"{FORMAT_VERSION} {source_digest}".encode(), digest_size=16)
        self._lengths: list[NDArray[np.int64]] = []
        self._length_buffer: list[int] = []
        self._occurrences: dict[bytes, int] = {}
        self.num_dropped = 0  # repeats that were asked to be dropped
        self._totals: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._max_length = 0
        self.closed = False

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.closed:
            self.abandon()

    def add(
        self,
        token_ids: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        *,
        source: str,
        num_eligible: int | None = None,
        drop_duplicate: bool = False,
    ) -> bool:
        """Append a sample; `num_eligible` is counted unless given.

        Returns False when it repeats an earlier one and `drop_duplicate` is set.
        """
        tokens_bytes = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        mask_bytes = np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes()
        assert len(tokens_bytes) == 4 * len(mask_bytes), "one mask byte a token"
        hasher = hashlib.blake2b(tokens_bytes, digest_size=16)
        hasher.update(mask_bytes)
        content = (
            hasher.digest()
        )  # without the occurrence number: exact repeats share their side of the split
        occurrence = self._occurrences.get(content, 0)
        self._occurrences[content] = occurrence + 1
        self._totals["duplicates"] += occurrence > 0
        if occurrence and drop_duplicate:
            self.num_dropped += 1
            return False
        hasher.update(occurrence.to_bytes(8, "little"))
        sample_id = hasher.digest()
        self._digest.update(sample_id)
        self._tokens.write(tokens_bytes)
        self._masks.write(mask_bytes)
        length, supervised = len(mask_bytes), int(np.count_nonzero(loss_mask))
        eligible = len(eligible_positions(loss_mask)) if num_eligible is None else num_eligible
        key = int.from_bytes(content[:8], "little")
        is_validation = key < self._validation_bound
        self._samples.add((sample_id, source, length, supervised, eligible, is_validation, key))
        self._length_buffer.append(length)
        if len(self._length_buffer) >= 1 << 16:
            self._lengths.append(np.asarray(self._length_buffer, dtype=np.int64))
            self._length_buffer = []
        self._totals["samples"] += 1
        self._totals["tokens"] += length
        self._totals["supervised"] += supervised
        self._totals["eligible"] += eligible
        self._max_length = max(self._max_length, length)
        return True

    def reject(self, line: int, reason: str, detail: str = "") -> None:
        """Keep a refused row: physical line (Parquet: row, from 1), short stable reason, particulars."""
        reason, detail = (
            text.encode("utf-8", "replace").decode()[:500] for text in (reason, detail)
        )  # both may quote the data
        self._rejects.add((line, reason, detail))
        self._reasons[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < 3:
            examples.append(f"line {line}: {detail}" if detail else f"line {line}")

    def rejects_summary(self, most: int = 5) -> str:
        """The most frequent reasons with counts and up to three examples each, one a line."""
        return "\n".join(
            f"  {count} x {reason} ({'; '.join(self._examples[reason])})"
            for reason, count in self._reasons.most_common(most)
        )

    @property
    def num_samples(self) -> int:
        return self._totals["samples"]

    @property
    def num_rejected(self) -> int:
        return sum(self._reasons.values())

    def close(self) -> dict[str, Any]:
        """Write what is left, the manifest last, and give the shard its final name. Returns the manifest."""
        self._finish_files()
        lengths = np.concatenate([*self._lengths, np.asarray(self._length_buffer, dtype=np.int64)])
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
        np.save(self._temporary / "offsets.npy", offsets)
        manifest = {
            "format_version": FORMAT_VERSION,
            "digest": self._digest.hexdigest(),
            "source_digest": self.source_digest,
            "num_rows": self.num_rows,
            "num_blank": self.num_blank,
            "num_samples": self.num_samples,
            "num_rejected": self.num_rejected,
            "num_duplicates": self._totals["duplicates"],
            "num_tokens": self._totals["tokens"],
            "num_supervised_tokens": self._totals["supervised"],
            "num_eligible_anchors": self._totals["eligible"],
            "max_length": self._max_length,
            "median_length": float(np.median(lengths)) if len(lengths) else 0.0,
            "rejects": dict(self._reasons.most_common()),
            "reject_examples": {reason: self._examples[reason] for reason in self._reasons},
            "notes": dict(sorted(self.notes.items())),
            "meta": self.meta,
        }
        (self._temporary / "manifest.json").write_text(
            json.dumps(manifest, indent=2) + "\n", encoding="utf-8"
        )
        _publish(self._temporary, self.directory)
        self.closed = True
        return manifest

    def abandon(self) -> None:
        """Remove what was written."""
        self._finish_files()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self.closed = True

    def _finish_files(self) -> None:
        for file in (self._tokens, self._masks):
            file.close()
        for rows in (self._samples, self._rejects):
            rows.close()


class _Rows:
    """Appends tuples to a Parquet file in groups."""

    def __init__(self, path: Path, schema: pa.Schema, group: int = 1 << 15) -> None:
        self._schema, self._group = schema, group
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._pending: list[tuple[Any, ...]] = []

    def add(self, row: tuple[Any, ...]) -> None:
        self._pending.append(row)
        if len(self._pending) >= self._group:
            self._flush()

    def _flush(self) -> None:
        columns = list(zip(*self._pending)) or [()] * len(self._schema)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, self._schema)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._pending = []

    def close(self) -> None:
        if self._writer.is_open:
            self._flush()
            self._writer.close()


def _publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, replacing an older one."""
    if final.exists():
        old = final.with_name(f".{final.name}.{os.getpid()}.old")
        os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old)
    else:
        os.replace(temporary, final)


def read_manifest(shard: Path) -> dict[str, Any]:
    """The manifest of a shard.

    Raises:
        UserError: there is no complete shard of this format version.
    """
    path = Path(shard) / "manifest.json"
    if not path.is_file():
        raise UserError(
            f"{shard}: not a token shard (no manifest.json); allowed: a directory written by ingest"
        )
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {manifest.get('format_version')!r}; allowed: {FORMAT_VERSION}"
        )
    return manifest


class TokenStore:
    """All samples of some shards, read only. Indices are positions in the global order, 0 to N - 1.

    Attributes:
        lengths: int32 [N], tokens of each sample.
        num_eligible: int32 [N], eligible anchors of each sample.
        num_supervised: int32 [N], supervised tokens of each sample.
        is_validation: bool [N], the split of this store, see `validation_threshold`.
        sources: names that `source_id` (int16 [N]) points to.
        train_indices, validation_indices: int32, ascending.
        digest: of the shards in order and of the split.
        duplicate_shards: shards that were named twice (by content) and opened once.
    """

    def __init__(
        self, shards: Sequence[Path], *, validation_share: float, min_validation_samples: int
    ) -> None:
        by_digest: dict[str, Path] = {}
        self.duplicate_shards: list[Path] = []
        self.manifests: list[dict[str, Any]] = []
        for shard in shards:
            digest = read_manifest(shard)["digest"]
            if digest in by_digest:
                self.duplicate_shards.append(Path(shard))
            by_digest.setdefault(digest, Path(shard))
        self.shards = [by_digest[digest] for digest in sorted(by_digest)]
        self.manifests = [read_manifest(shard) for shard in self.shards]
        samples = pa.concat_tables([pq.read_table(shard / "samples.parquet") for shard in self.shards])
        self._open_files()
        assert len(samples) == int(self._first_row[-1]), "samples.parquet and offsets.npy disagree"

        self.lengths: NDArray[np.int32] = samples["sequence_length"].to_numpy()
        self.num_eligible: NDArray[np.int32] = samples["num_eligible_anchors"].to_numpy()
        self.num_supervised: NDArray[np.int32] = samples["num_supervised_tokens"].to_numpy()
        ids = samples["sample_id"].combine_chunks()
        self._sample_ids: NDArray[np.void] = np.frombuffer(ids.buffers()[1], dtype="V16")[: len(samples)]
        encoded = samples["source"].combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        self.sources: list[str] = sorted(names)
        rank = {name: position for position, name in enumerate(self.sources)}
        recode = np.asarray([rank[name] for name in names] or [0], dtype=np.int16)
        self.source_id: NDArray[np.int16] = recode[encoded.indices.to_numpy()]
        keys = samples["validation_key"].to_numpy()
        self._keys = keys
        bound = validation_threshold(keys, share=validation_share, minimum=min_validation_samples)
        self.is_validation: NDArray[np.bool_] = keys < np.uint64(bound)
        self.train_indices = np.flatnonzero(~self.is_validation).astype(np.int32)
        self.validation_indices = np.flatnonzero(self.is_validation).astype(np.int32)
        digest_text = " ".join([*(m["digest"] for m in self.manifests), str(bound)])
        self.digest = hashlib.blake2b(digest_text.encode(), digest_size=16).hexdigest()

    @classmethod
    def open(
        cls,
        shard_dirs: Iterable[Path | str],
        *,
        validation_share: float = 0.01,
        min_validation_samples: int = 32,
    ) -> TokenStore:
        """Open shards in the order of their digests.

        Args:
            shard_dirs: directories written by `ShardWriter`.
            validation_share: `data.validation_share`; 0 for no validation samples.
            min_validation_samples: `data.min_validation_samples`.

        Raises:
            UserError: no shard, or a directory that is not one.
        """
        shards = [Path(shard) for shard in shard_dirs]
        if not shards:
            raise UserError("token store: no shards given; allowed: at least one directory written by ingest")
        return cls(shards, validation_share=validation_share, min_validation_samples=min_validation_samples)

    def _open_files(self) -> None:
        """Map both big files of each shard. Plain arrays over the maps: slicing an np.memmap costs 1.6x."""
        all_offsets: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        for shard in self.shards:
            offsets = np.load(shard / "offsets.npy")
            all_offsets.append(offsets)
            self._tokens.append(_map(shard / "tokens.bin", np.dtype("<i4"), int(offsets[-1])))
            self._masks.append(_map(shard / "loss_mask.bin", np.dtype(np.uint8), int(offsets[-1])))
        counts = [len(offsets) - 1 for offsets in all_offsets]
        self._first_row = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._starts = np.concatenate(
            [offsets[:-1] for offsets in all_offsets]
        )  # of each sample in its shard

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def num_repeats(self) -> int:
        """Samples whose tokens and mask are those of another one before them, whatever the file."""
        return len(self._keys) - len(np.unique(self._keys))

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Shard of a sample and the bounds of its tokens there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        start = int(self._starts[index])
        return int(self._shard_of[index]), start, start + int(self.lengths[index])

    def row(self, index: int) -> tuple[str, int]:
        """(shard digest, row number) of a sample: what names it for good."""
        shard = self._locate(index)[0]
        return self.manifests[shard]["digest"], index - int(self._first_row[shard])

    def sample_id(self, index: int) -> bytes:
        """16 bytes: blake2b of token ids (int32 LE), loss mask and occurrence number in its file (u64 LE)."""
        return bytes(self._sample_ids[index])

    def token_ids(self, index: int) -> NDArray[np.int32]:
        """int32 [S], a read-only view of the file."""
        shard, start, end = self._locate(index)
        return self._tokens[shard][start:end]

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """uint8 [S], a read-only view of the file."""
        shard, start, end = self._locate(index)
        return self._masks[shard][start:end]

    def gather(self, indices: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int64]]:
        """Samples one after another: (token_ids int32 [T], loss_mask uint8 [T], cu_seqlens int64 [n + 1]).

        Lengths 2, 3, 1 -> cu_seqlens 0, 2, 5, 6.
        """
        rows = np.asarray(indices, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"samples {rows.min()} to {rows.max()} of a store of {len(self)}")
        cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(self.lengths[rows], out=cu_seqlens[1:])
        if len(rows) == 0:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8), cu_seqlens
        starts = self._starts[rows]
        ends = starts + self.lengths[rows]
        bounds = list(zip(self._shard_of[rows].tolist(), starts.tolist(), ends.tolist()))
        token_ids = np.concatenate([self._tokens[shard][start:end] for shard, start, end in bounds])
        loss_mask = np.concatenate([self._masks[shard][start:end] for shard, start, end in bounds])
        return token_ids, loss_mask, cu_seqlens


def _map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes, offsets.npy says {count * dtype.itemsize}; ingest again"
        )
    if count == 0:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
