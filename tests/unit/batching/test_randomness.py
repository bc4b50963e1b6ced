"""Random words against published ones, permutations against a reference in Python's own integers."""

from __future__ import annotations

import numpy as np

from dflash_core.batching.randomness import mix64, random_words, shuffled, stream_key

WORD, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def reference(n: int, key: int) -> list[int]:
    """Shuffle by Fisher-Yates from the end, for a permutation that fits one cell."""
    out, word = list(range(n)), mixed(key ^ GOLDEN)
    for last in range(n - 1, 0, -1):
        word = (word + GOLDEN) & WORD
        pick = (mixed(word) >> 32) * (last + 1) >> 32
        out[last], out[pick] = out[pick], out[last]
    return out


def inner_key(epoch: int) -> int:
    return mixed(int(stream_key(0, epoch, "samples")) ^ GOLDEN)


def test_random_words_are_splitmix64():
    """First outputs of SplitMix64 with seed 0, as published with the reference implementation in C."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(word) for word in random_words(3, np.uint64(0))] == expected
    assert int(mix64(np.array([0], np.uint64))[0]) == 0


def test_the_shuffle_is_pinned_on_every_machine():
    assert shuffled(10, stream_key(0, 0, "samples")).tolist() == [5, 1, 2, 3, 8, 0, 7, 6, 9, 4]


def test_the_shuffle_is_a_permutation_and_uniform():
    for n in (0, 1, 2, 50_000):
        assert np.sort(shuffled(n, stream_key(1, 2, "samples"))).tolist() == list(range(n))
    counts = np.zeros((4, 4))
    for epoch in range(4000):
        counts[np.arange(4), shuffled(4, stream_key(0, epoch, "samples"))] += 1
    assert abs(counts / 4000 - 0.25).max() < 0.03  # over four standard errors


def test_permutations_of_small_and_large_keys_in_one_process() -> None:
    """Compiled code sees inner keys below 2^63 first, then those that no int64 holds."""
    epochs = sorted(range(20), key=inner_key)
    assert inner_key(epochs[0]) < 2**63 <= inner_key(epochs[-1])
    for epoch in epochs:
        key = stream_key(0, epoch, "samples")
        assert shuffled(50, key).tolist() == reference(50, int(key))
