"""Cut: which samples share a microbatch. Every strategy ends here, in lists of samples; order comes after.

Guarantee, for any lengths: every sample in exactly one microbatch, no microbatch empty, none over the token
budget. Padded microbatches hold n * width slots, packed ones the sum of their lengths.

Price on 902,000 lengths (mean 1,615, at most 8,142) at a budget of 49,152 slots: packed reaches the lower
bound of 29,635 packs or one more, sorted_fresh keeps 99.1% of its slots for tokens, both in about 0.1 s an
epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.buckets import edges_of_lengths, length_counts
from dflash_core.batching.cores import on_all_cores
from dflash_core.batching.randomness import shuffled, stream_key
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError

_KEY_MICROBATCHES = 6  # sorted_fresh: a sort key holds at least this many
_MAX_PAIRS = 64  # packed: oldest candidates tried for an exact completion; the third on average succeeds


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Samples in cut order, and the microbatches over them.

    order, lengths: int32[N], samples and their lengths; offsets: int64[n + 1]; static_edges: int32[k + 1]
    where rows are padded to their bucket's edge.
    """

    order: NDArray[np.int32]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    static_edges: NDArray[np.int32] | None


def cut_microbatches(lengths: NDArray[np.int32], config: BatchingConfig, *, seed: int, epoch: int) -> Cut:
    """Cut an epoch's samples into microbatches; a pure function of its arguments.

    Args:
        lengths: int32[N], each 1 to `config.token_budget`.
        config: strategy and its settings.
        seed, epoch: decide the shuffle; `sorted` ignores both (its composition is fixed).

    Raises:
        UserError: given bucket edges that do not fit the lengths or the budget.
    """
    longest = int(lengths.max(initial=1))
    if config.strategy == "sorted":
        stream = np.arange(len(lengths), dtype=np.int32)
    else:
        stream = shuffled(len(lengths), stream_key(seed, epoch, "samples"))
    in_order = gathered(lengths, stream)  # the only random reads of memory: all that follows is sequential
    if config.strategy == "packed":
        mean = int(lengths.sum(dtype=np.int64)) // max(len(lengths), 1)
        reserve = min(config.token_budget // 2, mean * 7 // 5)  # room for about two more samples
        _pack(stream, in_order, config.token_budget, config.pool_size, longest, reserve, _MAX_PAIRS)
        return Cut(order=stream, lengths=in_order, offsets=_offsets_of_marks(stream), static_edges=None)
    static_edges = None
    if config.strategy == "bucketed":
        edges = bucket_edges(lengths, config)
        group_of_length = np.maximum(np.searchsorted(edges, np.arange(longest + 1)) - 1, 0)
        static_edges = edges if config.shapes == "static" else None
    elif config.strategy == "sorted_fresh":
        group_of_length = _sort_keys(length_counts(lengths), config.sort_quantum, config.token_budget)
    else:
        group_of_length = np.arange(longest + 1) if config.strategy == "sorted" else np.zeros(longest + 1)
    num_groups = int(group_of_length[-1]) + 1
    widths = np.zeros(num_groups, np.int32) if static_edges is None else static_edges[1 : num_groups + 1]
    order, in_order, starts = _group(stream, in_order, group_of_length.astype(np.int32), num_groups)
    _mark_padded(order, in_order, starts, widths, config.strategy == "bucketed", config.token_budget)
    return Cut(order=order, lengths=in_order, offsets=_offsets_of_marks(order), static_edges=static_edges)


def _sort_keys(counts: NDArray[np.int64], quantum: int, budget: int) -> NDArray[np.int64]:
    """Length -> sort key: ceil(length / quantum), neighbouring keys joined until they fill several
    microbatches.

    Samples of one key are drawn anew each epoch, so a key that fills a single microbatch would meet again as
    a whole.
    """
    lengths = np.arange(len(counts))
    rounded = -(-lengths // quantum)
    filled = np.bincount(rounded, weights=counts * np.minimum(rounded * quantum, budget) / budget)
    keys, key, joined = np.zeros(len(filled), np.int64), 0, 0.0
    for i in range(len(filled)):
        keys[i] = key
        joined += filled[i]
        if joined >= _KEY_MICROBATCHES:
            key, joined = key + 1, 0.0
    return keys[rounded]


def bucket_edges(lengths: NDArray[np.int32], config: BatchingConfig) -> NDArray[np.int32]:
    """The edges that `bucketed` uses: the given ones, checked, or the optimal ones for these lengths.

    Bucket i holds lengths in (edges[i], edges[i + 1]].
    """
    if config.edges is None:
        return edges_of_lengths(
            lengths, num_buckets=config.num_buckets, token_budget=config.token_budget, shapes=config.shapes
        )
    edges = np.asarray(config.edges, np.int32)
    longest = int(lengths.max(initial=0))
    if longest > edges[-1]:
        raise UserError(
            f"batching.edges: the last edge {edges[-1]} is not allowed; allowed: at least the longest "
            f"sample's {longest} tokens"
        )
    if config.shapes == "static" and edges[-1] > config.token_budget:
        raise UserError(
            f"batching.edges: the last edge {edges[-1]} is not allowed with static shapes; allowed: at most "
            f"batching.token_budget ({config.token_budget}), because a row is padded to its edge"
        )
    return edges


# Compiled code keeps to plain loops: a numpy call in it can add seconds of compilation to a first run.
# The end of a microbatch is marked in place: its last sample s is stored as ~s, which is negative.


def _offsets_of_marks(order: NDArray[np.int32]) -> NDArray[np.int64]:
    """Offsets int64[n + 1] of marked microbatches; removes the marks from `order`. 4 ~2 ~7 -> 4 2 7, 0 2
    3.
    """
    last = np.flatnonzero(order < 0)
    order[last] = ~order[last]
    return np.concatenate([[0], last + 1])


def gathered(values: NDArray[np.int32], order: NDArray[np.int32]) -> NDArray[np.int32]:
    """values[order]: in so short a loop the processor keeps many reads of memory under way at once."""
    out = np.empty(len(order), np.int32)
    on_all_cores(len(order), len(order), lambda first, last: _gather(out, values, order, first, last))
    return out


@numba.njit(cache=True, nogil=True)
def _gather(out, values, order, first, last):
    for i in range(first, last):
        out[i] = values[order[i]]


@numba.njit(cache=True)
def _group(stream, lengths, group_of_length, num_groups):
    """Stable counting sort by group: (samples, their lengths, int64[num_groups + 1] where each group
    starts).
    """
    starts = np.zeros(num_groups + 1, np.int64)
    for i in range(len(lengths)):
        starts[group_of_length[lengths[i]] + 1] += 1
    for group in range(num_groups):
        starts[group + 1] += starts[group]
    cursor = starts.copy()
    out, out_lengths = np.empty(len(stream), np.int32), np.empty(len(stream), np.int32)
    for i in range(len(stream)):
        group = group_of_length[lengths[i]]
        out[cursor[group]], out_lengths[cursor[group]] = stream[i], lengths[i]
        cursor[group] += 1
    return out, out_lengths, starts


@numba.njit(cache=True)
def _mark_padded(order, lengths, group_starts, static_width, separate, budget):
    """Append samples to a microbatch while rows * width stays within the budget; marks ends in `order`.

    Budget 10, lengths 2 3 3 | 5: 3 rows of 3 = 9 slots, then 5 would make 4 * 5 = 20: [2 3 3] [5].
    """
    rows, width = 0, 0
    for group in range(len(group_starts) - 1):
        for i in range(group_starts[group], group_starts[group + 1]):
            length = max(lengths[i], static_width[group])
            new_width = max(width, length)
            must_close = separate and i == group_starts[group]
            if rows > 0 and (must_close or (rows + 1) * new_width > budget):
                order[i - 1] = ~order[i - 1]
                rows, new_width = 0, length
            rows, width = rows + 1, new_width
    if rows > 0:
        order[len(order) - 1] = ~order[len(order) - 1]


@numba.njit(cache=True)
def _pack(stream, lengths, budget, pool_size, longest, reserve, max_pairs):
    """Turn `stream` and its `lengths`, in place, into packs with marked ends: random prefix, exact
    completion.

    The pool holds the next `pool_size` samples. A pack takes the oldest while at least `reserve` slots stay
    free; then the oldest that, with a partner from the pool, fills it exactly (else best); then whatever
    still fits. All come in the order of the stream, so a pack is close to an i.i.d. draw; sorting
    (best-fit-decreasing) would put equal lengths together.

    The pool's lengths are a bit set (one bit a length, a bit of summary a word) and a stack of samples for
    each length. The oldest sample leaves its stack from below: only the count falls. A place of `stream` is
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
    """One sample of `length` leaves the pool."""
    count[length] -= 1
    if count[length] == 0:
        words[length >> 6] ^= _bit(length)
        if words[length >> 6] == 0:
            summary[length >> 12] ^= _bit(length >> 6)


@numba.njit(cache=True)
def _at_most(words, summary, length):
    """The largest length in the bit set that is at most `length`; 0 when there is none."""
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
    """Number of the highest set bit; `word` is not 0."""
    top = np.uint64(0)
    for shift in (32, 16, 8, 4, 2, 1):
        step = np.uint64(word >> np.uint64(shift) != 0) * np.uint64(shift)
        word >>= step
        top += step
    return np.int64(top)
