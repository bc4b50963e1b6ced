"""The token store: written by ingest (`shard_writer.py`), read by training.

One file of conversations becomes one shard, a directory that appears complete or not at all:

    tokens.bin        int32, all samples one after another
    loss_mask.bin     uint8, the same positions: 1 where the token is supervised
    offsets.npy       int64 [n + 1], sample i is positions offsets[i] to offsets[i + 1]
    samples.parquet   one row per sample: sample_id, source, lengths, counts, is_validation, validation_key
    rejects.parquet   one row per rejected row of the source: line, element, reason, detail; `element` is the
                      number in a JSON array or in Parquet, where `line` is null
    manifest.json     counts and digests, written last

`TokenStore` opens shards in one global order (by digest, then row), whatever the order in which files are
named. Both large files are memory maps shared by all ranks of a machine: a random microbatch of 49,152
tokens costs a few hundred microseconds (`benchmarks/feed.py`), and the page cache decides how much of them
stays in memory. Beyond `MOST_MAPPED` shards only those used last are mapped: a process may have 1,024 files
open, and 65,530 maps.

Shape letters: S tokens of one sample, T tokens of a microbatch, N samples of a store, n samples
of a microbatch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from dflash_core.config import DataConfig
from dflash_core.data.shard_files import check_size, read_offsets, read_samples
from dflash_core.errors import UserError

FORMAT_VERSION = 1
# Validation keys are uniform in [0, KEY_RANGE).
KEY_RANGE = 1 << 64
# Shards whose two large files are mapped at a time.
MOST_MAPPED = 256
# Where no vocabulary is given: what int32 holds.
_MOST_IDS = 1 << 31


def validation_threshold(keys: ArrayLike, *, share: float, minimum: int) -> int:
    """Return the threshold below which a sample's validation key makes it a validation sample.

    The share is doubled until at least `minimum` samples fall below it, or a quarter of all samples if there
    are fewer than 4 x minimum; it never exceeds one half. So the rule is exact, depends on contents alone,
    and added files change it only when the data becomes large enough for a smaller share.

    Args:
        keys: uint64 [N], the validation keys of all samples: 64 bits of a digest of their content.
        share: requested share of validation samples, 0 to below 1; 0 means no validation samples.
        minimum: requested minimum number of them.

    Example: 1,000 samples, share 0.01, minimum 32: about 10 fall below 1%, about 20 below 2%, about 40 below
    4%, so the share is 4%.
    """
    keys = np.asarray(keys, dtype=np.uint64)
    if share <= 0 or len(keys) == 0:
        return 0
    wanted = min(minimum, len(keys) // 4)
    while share < 0.5 and np.count_nonzero(keys < np.uint64(int(share * KEY_RANGE))) < wanted:
        share = min(0.5, 2 * share)
    return int(share * KEY_RANGE)


def read_manifest(shard: Path) -> dict[str, Any]:
    """Return the manifest of a shard.

    Raises:
        UserError: there is no complete shard of this format version.
    """
    path = Path(shard) / "manifest.json"
    if not path.is_file():
        message = f"{shard}: not a token shard (no manifest.json); allowed: a directory written by ingest"
        raise UserError(message)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, digest = manifest["format_version"], manifest["digest"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error}); ingest the file again") from error
    if version != FORMAT_VERSION or not isinstance(digest, str):
        raise UserError(
            f"{path}: format_version {version!r}, digest {digest!r:.40}; allowed: {FORMAT_VERSION}"
        )
    return manifest


class TokenStore:
    """All samples of some shards, read-only. Indices are positions in the global order, 0 to N - 1.

    Args:
        shards, validation_share, min_validation_samples, vocab_size: see `open`.

    Attributes:
        lengths: int32 [N], tokens of each sample.
        num_eligible: int32 [N], eligible anchors of each sample.
        num_supervised: int32 [N], supervised tokens of each sample.
        is_validation: bool [N], the split of this store, see `validation_threshold`.
        sources: names of the sources; `source_id`, int32 [N], indexes them.
        train_indices, validation_indices: int32, ascending.
        digest: digest of the shards in order and of the split.
        duplicate_shards: shards whose content was given twice; each is opened once.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        validation_share: float,
        min_validation_samples: int,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = _MOST_IDS if vocab_size is None else vocab_size
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
        tables = [read_samples(shard) for shard in self.shards]
        self._open_files([table["sequence_length"].to_numpy() for table in tables])
        samples = pa.concat_tables(tables)
        self.lengths: NDArray[np.int32] = samples["sequence_length"].to_numpy()
        self.num_eligible: NDArray[np.int32] = samples["num_eligible_anchors"].to_numpy()
        self.num_supervised: NDArray[np.int32] = samples["num_supervised_tokens"].to_numpy()
        ids = samples["sample_id"].combine_chunks()
        self._sample_ids: NDArray[np.void] = np.frombuffer(ids.buffers()[1], dtype="V16")[: len(samples)]
        encoded = samples["source"].combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        self.sources: list[str] = sorted(names)
        rank = {name: position for position, name in enumerate(self.sources)}
        recode = np.asarray([rank[name] for name in names] or [0], dtype=np.int32)
        self.source_id: NDArray[np.int32] = recode[encoded.indices.to_numpy()]
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
        vocab_size: int | None = None,
    ) -> TokenStore:
        """Open shards in the order of their digests.

        Args:
            shard_dirs: directories written by `ShardWriter`.
            validation_share: `data.validation_share`; 0 for no validation samples.
            min_validation_samples: `data.min_validation_samples`.
            vocab_size: rows of the embedding that reads the tokens; other ids are rejected as they are read.

        Raises:
            UserError: no shards are given, or a directory is not a shard.
        """
        shards = [Path(shard) for shard in shard_dirs]
        if not shards:
            raise UserError("token store: no shards given; allowed: at least one directory written by ingest")
        return cls(
            shards,
            validation_share=validation_share,
            min_validation_samples=min_validation_samples,
            vocab_size=vocab_size,
        )

    def _open_files(self, lengths: list[NDArray[np.int32]]) -> None:
        """Read the offsets of each shard, and check that its large files are whole.

        Args:
            lengths: of the samples of each shard.
        """
        all_offsets: list[NDArray[np.int64]] = []
        for shard, lengths_of_shard in zip(self.shards, lengths, strict=True):
            offsets = read_offsets(shard, lengths_of_shard)
            all_offsets.append(offsets)
            check_size(shard / "tokens.bin", 4 * int(offsets[-1]))
            check_size(shard / "loss_mask.bin", int(offsets[-1]))
        self._mapped = functools.lru_cache(maxsize=MOST_MAPPED)(self._map)
        counts = [len(offsets) - 1 for offsets in all_offsets]
        self._first_row = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        # First position of each sample in the files of its shard.
        self._starts = np.concatenate([offsets[:-1] for offsets in all_offsets])

    def _map(self, shard: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Map tokens and masks of a shard, as plain arrays: slicing an np.memmap is 1.6 times slower."""
        directory = self.shards[shard]
        return (
            _map(directory / "tokens.bin", np.dtype("<i4")),
            _map(directory / "loss_mask.bin", np.dtype(np.uint8)),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def num_repeats(self) -> int:
        """Number of samples that repeat the tokens and mask of an earlier one, in any file."""
        return len(self._keys) - len(np.unique(self._keys))

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Return the shard of a sample and the bounds of its tokens there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        start = int(self._starts[index])
        return int(self._shard_of[index]), start, start + int(self.lengths[index])

    def row(self, index: int) -> tuple[str, int]:
        """Return (shard digest, row number) of a sample: its permanent name."""
        shard = self._locate(index)[0]
        return self.manifests[shard]["digest"], index - int(self._first_row[shard])

    def sample_id(self, index: int) -> bytes:
        """Return 16 bytes of blake2b over token ids (int32 LE), mask, and occurrence in its file (u64 LE)."""
        return bytes(self._sample_ids[index])

    def token_ids(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of a sample, int32 [S], a read-only view of the file.

        Raises:
            UserError: an id is outside of the vocabulary.
        """
        shard, start, end = self._locate(index)
        token_ids = self._mapped(shard)[0][start:end]
        self._check_ids(token_ids, [index])
        return token_ids

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """Return the loss mask of a sample, uint8 [S], a read-only view of the file."""
        shard, start, end = self._locate(index)
        return self._mapped(shard)[1][start:end]

    def gather(self, indices: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.int64]]:
        """Concatenate samples: (token_ids int32 [T], loss_mask uint8 [T], cu_seqlens int64 [n + 1]).

        Lengths 2, 3, 1 -> cu_seqlens 0, 2, 5, 6.

        Raises:
            UserError: a token id is outside of the vocabulary.
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
        parts = [self._part(*bound) for bound in bounds]
        token_ids = np.concatenate([tokens for tokens, _ in parts])
        loss_mask = np.concatenate([masks for _, masks in parts])
        self._check_ids(token_ids, rows)
        return token_ids, loss_mask, cu_seqlens

    def _check_ids(self, token_ids: NDArray[np.int32], rows: Iterable[int]) -> None:
        """Check the ids of some samples: an embedding or a kernel would read beside its table."""
        if len(token_ids) == 0 or (token_ids.min() >= 0 and token_ids.max() < self._vocab_size):
            return
        for row in map(int, rows):
            shard, start, end = self._locate(row)
            ids = self._mapped(shard)[0][start:end]
            if wrong := ids[(ids < 0) | (ids >= self._vocab_size)].tolist():
                path, most = self.shards[shard] / "tokens.bin", self._vocab_size - 1
                number = row - int(self._first_row[shard])
                raise UserError(
                    f"{path}: sample {number} has the token id {wrong[0]}; allowed by the target's "
                    f"embedding: 0 to {most}. Ingest the file again, or take the tokenizer of the target"
                )

    def _part(self, shard: int, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return tokens and masks of a part of a shard, views where all shards may stay mapped."""
        tokens, masks = self._mapped(shard)
        tokens, masks = tokens[start:end], masks[start:end]
        return (tokens, masks) if len(self.shards) <= MOST_MAPPED else (tokens.copy(), masks.copy())


def open_store(
    shards: Iterable[Path | str], data: DataConfig, *, vocab_size: int | None = None
) -> TokenStore:
    """Open shards with the validation split of a run's configuration; see `TokenStore.open`."""
    return TokenStore.open(
        shards,
        validation_share=data.validation_share,
        min_validation_samples=data.min_validation_samples,
        vocab_size=vocab_size,
    )


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
