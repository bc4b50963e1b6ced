"""Permutations against a reference in Python's own integers."""

from __future__ import annotations

from dflash_core.batching.randomness import shuffled, stream_key

WORD, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def reference(n: int, key: int) -> list[int]:
    """Fisher-Yates from the end, for what fits one cell."""
    out, word = list(range(n)), mixed(key ^ GOLDEN)
    for last in range(n - 1, 0, -1):
        word = (word + GOLDEN) & WORD
        pick = (mixed(word) >> 32) * (last + 1) >> 32
        out[last], out[pick] = out[pick], out[last]
    return out


def inner_key(epoch: int) -> int:
    return mixed(int(stream_key(0, epoch, "samples")) ^ GOLDEN)


def test_permutations_of_small_and_large_keys_in_one_process() -> None:
    """Compiled code sees inner keys below 2^63 first, then those that no int64 holds."""
    epochs = sorted(range(20), key=inner_key)
    assert inner_key(epochs[0]) < 2**63 <= inner_key(epochs[-1])
    for epoch in epochs:
        key = stream_key(0, epoch, "samples")
        assert shuffled(50, key).tolist() == reference(50, int(key))
