"""Small shards for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_core.data.shard_writer import ShardWriter


def write_shard(directory: Path, samples: list[list[int]], *, digest: str = "d", source: str = "s") -> Path:
    """Write a shard whose samples are supervised from their second token on."""
    with ShardWriter(directory, source_digest=digest, meta={}) as writer:
        for tokens in samples:
            mask = np.ones(len(tokens), dtype=np.uint8)
            mask[0] = 0
            writer.num_rows += 1
            writer.add(np.array(tokens, dtype=np.int32), mask, source=source)
        writer.close()
    return directory


def numbered(count: int, start: int = 0) -> list[list[int]]:
    """Return the tokens of so many distinct samples."""
    return [[start + n, 7, 7, n] for n in range(count)]
