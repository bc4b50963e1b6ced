"""The writer of shards; `store.py` describes their files and reads them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_core.anchors import eligible_positions
from dflash_core.data.raw_rows import place_text
from dflash_core.data.store import FORMAT_VERSION, KEY_RANGE

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
_REJECTS_SCHEMA = pa.schema(
    [("line", pa.int64()), ("element", pa.int64()), ("reason", pa.string()), ("detail", pa.string())]
)


class ShardWriter:
    """Writer of one shard; a context manager. Nothing is visible under `directory` before `close`.

    Args:
        directory: final name of the shard. An older shard there is replaced at `close`.
        source_digest: digest of everything the shard was made from; part of the shard's digest.
        meta: JSON values kept unchanged in the manifest.
        validation_share: share of the key range whose samples are marked `is_validation` in samples.parquet.
            A store with few samples raises it, see `validation_threshold`.
    """

    def __init__(
        self, directory: Path, *, source_digest: str, meta: dict[str, Any], validation_share: float = 0.01
    ) -> None:
        self.directory = Path(directory)
        self.source_digest = source_digest
        self.meta = meta
        # Counts of remarks that do not reject a row.
        self.notes: Counter[str] = Counter()
        # Rows of the source, without blank lines.
        self.num_rows = 0
        self.num_blank = 0
        # Repeats of earlier samples that were dropped on request.
        self.num_dropped = 0
        # Rows rejected because they are too long, and tokens lost with them and by cutting: at least so many.
        self.num_over_length = 0
        self.num_over_length_tokens = 0
        self.closed = False
        self._validation_bound = int(validation_share * KEY_RANGE)
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
        self._totals: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._max_length = 0

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
        drop_duplicate: bool = False,
    ) -> bool:
        """Append a sample; return False if `drop_duplicate` is set and it repeats an earlier one."""
        tokens_bytes = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        mask_bytes = np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes()
        assert len(tokens_bytes) == 4 * len(mask_bytes), "one mask byte per token"
        hasher = hashlib.blake2b(tokens_bytes, digest_size=16)
        hasher.update(mask_bytes)
        # Without the occurrence number, so that exact repeats are on the same side of the validation split.
        content = hasher.digest()
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
        eligible = len(eligible_positions(loss_mask))
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

    def reject(self, line: int | None, reason: str, detail: str = "", *, element: int | None = None) -> None:
        """Keep a rejected row: its place (see `RawRow`), a short stable reason, and details."""
        # Both may quote the data, lone surrogates included.
        reason, detail = (text.encode("utf-8", "replace").decode()[:500] for text in (reason, detail))
        self._rejects.add((line, element, reason, detail))
        self._reasons[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < 3:
            place = place_text(line, element)
            examples.append(f"{place}: {detail}" if detail else place)

    def rejects_summary(self, most: int = 5) -> str:
        """Return the most frequent reasons with counts and up to three examples each, one reason per line."""
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
        """Complete the files, give the shard its final name, and return its manifest."""
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
            "num_over_length": self.num_over_length,
            "num_over_length_tokens": self.num_over_length_tokens,
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
        text = json.dumps(manifest, indent=2) + "\n"
        (self._temporary / "manifest.json").write_text(text, encoding="utf-8")
        _publish(self._temporary, self.directory)
        self.closed = True
        return manifest

    def abandon(self) -> None:
        """Remove all that was written."""
        self._finish_files()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self.closed = True

    def _finish_files(self) -> None:
        for file in (self._tokens, self._masks):
            file.close()
        for rows in (self._samples, self._rejects):
            rows.close()


class _Rows:
    """Parquet file to which rows are appended in groups."""

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
    """Move a finished directory to its final name, replacing an older one."""
    if final.exists():
        old = final.with_name(f".{final.name}.{os.getpid()}.old")
        os.replace(final, old)
        os.replace(temporary, final)
        # NFS keeps files that a process has open.
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(temporary, final)
