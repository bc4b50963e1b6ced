"""Random numbers of a batch plan: the same on every machine, numpy version and thread count.

Counter-based: word i of a stream is `mix64(key + (i + 1) * GOLDEN)`, the SplitMix64 generator (Steele, Lea,
Flood 2014), so any word is computed without the ones before it. Keys come from BLAKE2b of (seed, epoch,
purpose); nothing here depends on numpy's own generators, whose streams may change between versions.
"""

from __future__ import annotations

import hashlib

import numba
import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cores import on_all_cores

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_U27, _U30, _U31, _U32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_ONE = np.uint64(1)
_CELL = 1 << 14  # samples of one shuffle cell: they stay in a core's cache


def stream_key(seed: int, epoch: int, purpose: str) -> np.uint64:
    """Return the key of one stream: BLAKE2b of seed, epoch and purpose. Any integers are allowed."""
    digest = hashlib.blake2b(f"{int(seed)}/{int(epoch)}/{purpose}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _mix64(word):  # uint64 -> uint64, on scalars (numba) and arrays (numpy)
    word = (word ^ (word >> _U30)) * _MIX_1
    word = (word ^ (word >> _U27)) * _MIX_2
    return word ^ (word >> _U31)


_mix64_scalar = numba.njit(_mix64)


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser, a bijection of 64-bit words that scatters them."""
    return _mix64(words)


def random_words(n: int, key: np.uint64) -> NDArray[np.uint64]:
    """Return words 0..n-1 of the stream `key`."""
    counters = np.arange(1, n + 1, dtype=np.uint64)
    return _mix64(counters * _GOLDEN + key)


def shuffled(n: int, key: np.uint64) -> NDArray[np.int32]:
    """Return a permutation of 0..n-1, uniform over all of them, decided by `key`.

    Two stages (Rao 1961, Sandelius 1962): each index goes to one of 2^b cells at random, then each cell is
    shuffled by Fisher-Yates. Sequential reads and cache-sized writes: 100M indices take a second, not ten.
    """
    num_cells = 1
    while num_cells * _CELL < n:
        num_cells *= 2
    out, starts = _scattered(n, np.uint64(key), num_cells)
    # words used before each cell, and another stream for the order inside the cells
    drawn = np.concatenate([[0], np.cumsum(np.maximum(np.diff(starts) - 1, 0))])
    second = np.uint64(_mix64_scalar(np.uint64(key) ^ _GOLDEN))
    on_all_cores(num_cells, n, lambda first, last: _shuffle_cells(out, starts, drawn, second, first, last))
    return out


@numba.njit(cache=True, nogil=True)
def _scattered(n, key, num_cells):
    """Return indices by cell, in order within it, and each cell's start: int32[n], int64[num_cells + 1]."""
    out = np.empty(n, np.int32)
    starts = np.zeros(num_cells + 1, np.int64)
    cell_mask = np.uint64(num_cells - 1)
    word = key
    for _ in range(n):
        word += _GOLDEN
        starts[np.int64(_mix64_scalar(word) & cell_mask) + 1] += 1
    for cell in range(num_cells):
        starts[cell + 1] += starts[cell]
    cursor = starts.copy()
    word = key
    for i in range(n):
        word += _GOLDEN
        drawn = np.int64(_mix64_scalar(word) & cell_mask)
        out[cursor[drawn]] = i
        cursor[drawn] += 1
    return out, starts


@numba.njit(cache=True, nogil=True)
def _shuffle_cells(out, starts, drawn, key, first_cell, last_cell):
    for cell in range(first_cell, last_cell):
        first = starts[cell]
        word = key + np.uint64(drawn[cell]) * _GOLDEN
        for last in range(starts[cell + 1] - 1, first, -1):
            word += _GOLDEN
            span = np.uint64(last - first + 1)
            pick = first + np.int64(((_mix64_scalar(word) >> _U32) * span) >> _U32)
            out[last], out[pick] = out[pick], out[last]
