"""Packing: samples end to end, without padding, in packs that fill the token budget.

Policy: i.i.d. order with exact completion. A pack takes samples in their random order until little room is
left, then the oldest candidates that fill the rest; sorting (best-fit-decreasing) would join equal lengths.

Price on 902,000 lengths (mean 1,615, at most 8,142) at a budget of 49,152 slots: the lower bound of 29,635
packs or one more, in about 0.1 s per epoch.

Compiled code keeps to plain loops: a numpy call in it can add seconds of compilation to a first run.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

_MAX_PAIRS = 64  # oldest candidates tried for an exact completion; the third on average succeeds


def pack(stream: NDArray[np.int32], lengths: NDArray[np.int32], *, token_budget: int, pool_size: int) -> None:
    """Turn `stream` and its `lengths`, in place, into packs; the last sample s of a pack is stored as ~s.

    Args:
        stream: int32[N], samples in random order.
        lengths: int32[N], their lengths, each at most `token_budget`.
        token_budget: slots of a pack.
        pool_size: candidates for completing a pack.
    """
    mean = int(lengths.sum(dtype=np.int64)) // max(len(lengths), 1)
    reserve = min(token_budget // 2, mean * 7 // 5)  # room for about two more samples
    _pack(stream, lengths, token_budget, pool_size, int(lengths.max(initial=1)), reserve, _MAX_PAIRS)


@numba.njit(cache=True)
def _pack(stream, lengths, budget, pool_size, longest, reserve, max_pairs):
    """Pack in place: random prefix, exact completion.

    The pool holds the next `pool_size` samples. A pack takes the oldest while at least `reserve` slots stay
    free; then the oldest that, with a partner from the pool, fills it exactly (else best); then whatever
    still fits. All come in the order of the stream, so a pack is close to an i.i.d. draw.

    The pool's lengths are a bit set (one bit per length, one bit of summary per word) and a stack of samples
    per length. The oldest sample leaves its stack from below: only the count falls. A position of `stream` is
    written only after the pool has read it.
    """
    n = len(stream)
    capacity = 1
    while capacity < 4 * pool_size:
        capacity *= 2
    mask = capacity - 1
    ring = np.zeros(capacity, np.int32)  # length of the sample at stream position p, at p & mask; 0 = taken
    samples = np.zeros(capacity, np.int32)
    below = np.zeros(capacity, np.int32)  # position of the next sample down its stack
    top = np.zeros(longest + 1, np.int32)  # position of the newest sample of each length
    count = np.zeros(longest + 1, np.int32)
    words = np.zeros(longest // 64 + 1, np.uint64)
    summary = np.zeros(longest // 4096 + 1, np.uint64)
    placed, head, tail, free, completing = 0, 0, 0, budget, False
    while placed < n:
        while head < tail and ring[head & mask] == 0:
            head += 1
        while tail < n and tail - placed < pool_size and tail - head < capacity:  # fill the pool
            length = lengths[tail]
            samples[tail & mask] = stream[tail]
            ring[tail & mask], below[tail & mask], top[length] = length, top[length], tail
            count[length] += 1
            words[length >> 6] |= _bit(length)
            summary[length >> 12] |= _bit(length >> 6)
            tail += 1
        oldest = ring[head & mask]
        if not completing and (free - oldest >= reserve or free == budget):
            ring[head & mask] = 0
            _remove(oldest, count, words, summary)
            stream[placed], lengths[placed] = samples[head & mask], oldest
            placed, head, free = placed + 1, head + 1, free - oldest
            continue
        chosen, partner = 0, 0
        if completing:
            chosen = _at_most(words, summary, min(free, longest))
        else:
            best, tries, position = 0, 0, head
            while position < tail and tries < max_pairs and best < free:
                length = ring[position & mask]
                position += 1
                if length == 0 or length > free:
                    continue
                tries += 1
                other = _at_most(words, summary, min(free - length, longest))
                if other == length and count[length] == 1:  # itself: look below
                    other = _at_most(words, summary, length - 1)
                if length + other > best:
                    best, chosen, partner = length + other, length, other
        completing = chosen > 0
        if not completing:  # nothing fits: close the pack
            stream[placed - 1] = ~stream[placed - 1]
            free = budget
        while chosen > 0:
            position = top[chosen]
            top[chosen] = below[position & mask]
            ring[position & mask] = 0
            _remove(chosen, count, words, summary)
            stream[placed], lengths[placed] = samples[position & mask], chosen
            placed, free = placed + 1, free - chosen
            chosen, partner = partner, 0
    if n > 0:
        stream[n - 1] = ~stream[n - 1]


@numba.njit(cache=True)
def _bit(number):
    return np.uint64(1) << (np.uint64(number) & np.uint64(63))


@numba.njit(cache=True)
def _remove(length, count, words, summary):
    """Take one sample of `length` out of the pool."""
    count[length] -= 1
    if count[length] == 0:
        words[length >> 6] ^= _bit(length)
        if words[length >> 6] == 0:
            summary[length >> 12] ^= _bit(length >> 6)


@numba.njit(cache=True)
def _at_most(words, summary, length):
    """Return the largest length in the bit set that is at most `length`, 0 when there is none."""
    if length <= 0:
        return 0
    word = length >> 6
    bits = words[word] & (~np.uint64(0) >> np.uint64(63 - (length & 63)))
    if bits == 0:
        block = word >> 6
        in_block = word & 63
        marks = summary[block] & ((np.uint64(1) << np.uint64(in_block)) - np.uint64(1))
        while marks == 0:
            if block == 0:
                return 0
            block -= 1
            marks = summary[block]
        word = (block << 6) + _top_bit(marks)
        bits = words[word]
    return (word << 6) + _top_bit(bits)


@numba.njit(cache=True)
def _top_bit(word):
    """Return the number of the highest set bit of `word`, which is not 0."""
    top = np.uint64(0)
    for shift in (32, 16, 8, 4, 2, 1):
        step = np.uint64(word >> np.uint64(shift) != 0) * np.uint64(shift)
        word >>= step
        top += step
    return np.int64(top)
