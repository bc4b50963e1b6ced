"""`TokenStore.gather`: random microbatches per second from a warm token store larger than a gigabyte.

    python -m benchmarks.feed                     # 1.2 GB, 8 shards, microbatches of 49,152 tokens

Lengths are log-normal with a mean near 390 tokens, at most 4,096, as in a large chat data set. Each
microbatch takes random samples of the whole store until the next one would not fit. Every fiftieth microbatch
is compared with its samples read one by one. Prints the figures, then one line of JSON with the same figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from dflash_core.data.shard_writer import ShardWriter
from dflash_core.data.store import TokenStore

BUDGET = 49_152


def write_shard(directory: Path, seed: int, num_tokens: int) -> Path:
    """Write a shard of random samples with at least `num_tokens` tokens; return its directory."""
    generator = np.random.default_rng(seed)
    with ShardWriter(directory, source_digest=f"feed {seed}", meta={}) as writer:
        written = 0
        while written < num_tokens:
            length = int(np.clip(generator.lognormal(5.6, 0.85), 8, 4096))
            mask = np.ones(length, dtype=np.uint8)
            mask[: length // 3] = 0
            writer.num_rows += 1
            writer.add(generator.integers(0, 49_152, length, dtype=np.int32), mask, source=f"shard-{seed}")
            written += length
        writer.close()
    return directory


def random_microbatches(store: TokenStore, count: int) -> list[np.ndarray]:
    """Return the rows of `count` random microbatches of at most BUDGET tokens."""
    generator = np.random.default_rng(0)
    microbatches = []
    for _ in range(count):
        rows = generator.integers(0, len(store), 1024)
        fit = int(np.searchsorted(np.cumsum(store.lengths[rows], dtype=np.int64), BUDGET, side="right"))
        microbatches.append(rows[:fit])
    return microbatches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # per token 4 bytes of id and 1 byte of mask
        tokens_per_shard = int(args.gigabytes * 1e9 / 5 / args.shards)
        shards = [write_shard(Path(directory) / f"s{n}", n, tokens_per_shard) for n in range(args.shards)]
        started = time.perf_counter()
        store = TokenStore.open(shards)
        open_seconds = time.perf_counter() - started
        microbatches = random_microbatches(store, args.microbatches)
        for rows in microbatches[::50]:
            token_ids, loss_mask, _ = store.gather(rows)
            assert np.array_equal(token_ids, np.concatenate([store.token_ids(row) for row in rows]))
            assert np.array_equal(loss_mask, np.concatenate([store.loss_mask(row) for row in rows]))
        rates = []
        for _ in range(args.rounds + 1):
            started = time.perf_counter()
            for rows in microbatches:
                store.gather(rows)
            rates.append(args.microbatches / (time.perf_counter() - started))
        # the first round fills the page cache
        rates = rates[1:]
        tokens = float(np.mean([store.lengths[rows].sum() for rows in microbatches]))
    result = {
        "store_gigabytes": args.gigabytes,
        "samples": len(store),
        "shards": args.shards,
        "open_seconds": open_seconds,
        "microbatches_per_second": statistics.median(rates),
        "microbatches_per_second_min": min(rates),
        "microbatches_per_second_max": max(rates),
        "tokens_per_microbatch": tokens,
    }
    print(
        f"{len(store):,} samples, {args.gigabytes} GB in {args.shards} shards, opened in {open_seconds:.2f} s"
    )
    print(
        f"{statistics.median(rates):,.0f} microbatches/s ({min(rates):,.0f} to {max(rates):,.0f}) of "
        f"{tokens:,.0f} tokens on average"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
