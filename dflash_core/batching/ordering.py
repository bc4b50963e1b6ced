"""Order: which microbatches share an optimizer step, and which rank of a step runs which.

Permutes whole microbatches, so padding does not change. Three pure stages: `interleave` mixes, `close_steps`
ends steps by real tokens, `assign_to_ranks` divides one step among ranks. Only the last depends on the number
of ranks.

Measured on 902,000 lengths: a step of 64 length-sorted microbatches has a mean length that varies 32 times as
much as that of an i.i.d. step; interleaved, half as much.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cores import on_all_cores
from dflash_core.batching.randomness import random_words

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
# start in the middle, so that the few microbatches of a short last step are not the extreme ones
_HALF = np.uint64(1 << 63)
_MAX_SWEEPS = 8


def interleave(mean_lengths: NDArray[np.float64], *, per_step: int, key: np.uint64) -> NDArray[np.int64]:
    """Return an order of microbatches in which every window of `per_step` holds one of each length class.

    The microbatches, sorted by mean length, fall into `per_step` classes of equal size. Position i takes a
    random unused one of class `visit[i % per_step]`. As the visiting order repeats, any `per_step` neighbours
    have one of each class, wherever a step starts; as it is the golden-ratio sequence (Kronecker), shorter
    and longer windows are spread evenly too, so a step may close a little sooner or later.

    Means 1 2 3 4 5 6, per_step 3: classes {1 2} {3 4} {5 6}, e.g. 2 5 3 | 1 6 4.

    Args:
        mean_lengths: float64[n], tokens per sample of each microbatch.
        per_step: about the number of microbatches of a step.
        key: stream of the random choice inside a class.

    Returns:
        int64[n]: a permutation of microbatch numbers.
    """
    n = len(mean_lengths)
    per_step = max(1, min(per_step, n))
    points = np.arange(per_step, dtype=np.uint64) * _GOLDEN + _HALF
    visit = np.argsort(np.argsort(points, kind="stable"), kind="stable")
    wanted_class = visit[np.arange(n) % per_step].astype(np.uint64)
    priority = (wanted_class << np.uint64(40)) | (random_words(n, key) >> np.uint64(24))
    out = np.empty(n, np.int64)
    out[np.argsort(priority, kind="stable")] = np.argsort(mean_lengths, kind="stable")
    return out


def random_order(n: int, key: np.uint64) -> NDArray[np.int64]:
    """Return a random permutation of microbatch numbers, int64[n]."""
    return np.argsort(random_words(n, key), kind="stable")


@numba.njit(cache=True)
def close_steps(tokens, tokens_per_step):
    """Close a step at the first microbatch that brings it to `tokens_per_step` tokens.

    Tokens 4 4 4 4 4, 6 per step: [4 4] [4 4] [4] -> 0 2 4 5; the rest is kept as a smaller step.

    Args:
        tokens: int64[n], real tokens of each microbatch.
        tokens_per_step: real tokens that close a step.

    Returns:
        int64[s + 1]: offsets of steps over microbatches.
    """
    offsets = np.zeros(len(tokens) + 1, np.int64)
    steps, reached = 0, 0
    for i in range(len(tokens)):
        reached += tokens[i]
        if reached >= tokens_per_step or i == len(tokens) - 1:
            steps += 1
            offsets[steps] = i + 1
            reached = 0
    return offsets[: steps + 1].copy()


def take_microbatches(
    order: NDArray[np.int32], offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return samples int32[N] and offsets int64[n + 1] of the microbatches `chosen`, in that order."""
    out = np.empty(len(order), np.int32)
    into = np.concatenate([[0], np.cumsum(np.diff(offsets)[chosen])])
    on_all_cores(len(chosen), len(order), lambda a, b: _take(out, into, order, offsets, chosen, a, b))
    return out, into


@numba.njit(cache=True, nogil=True)
def _take(out, into, order, offsets, chosen, first, last):
    for i in range(first, last):
        placed = into[i]
        for j in range(offsets[chosen[i]], offsets[chosen[i] + 1]):
            out[placed] = order[j]
            placed += 1


def assign_to_ranks(
    seconds: NDArray[np.float64], parts: NDArray[np.float64], world_size: int
) -> NDArray[np.int32]:
    """Divide the k microbatches of one step among ranks: equal counts, equal work.

    Microbatches of neighbouring cost run at the same time (column by column, the costliest first), so ranks
    that wait for each other in every microbatch wait little. Inside a column each goes where the totals of
    all parts stay most even, then pairs are exchanged while that helps.

    Args:
        seconds: float64[k], predicted cost of each microbatch.
        parts: float64[k, p], its kinds of work (target slots, attention pairs, draft slots, ...), any units.
        world_size: number of ranks.

    Returns:
        int32[world_size, ceil(k / world_size)]: numbers 0..k-1, -1 = idle, only in the last column.
    """
    assert world_size >= 1
    assert len(seconds) == len(parts)
    columns = -(-len(seconds) // world_size)
    members = np.full((columns, world_size), -1, np.int32)
    members.reshape(-1)[: len(seconds)] = np.argsort(-seconds, kind="stable")
    if world_size > 1:
        work = np.concatenate([parts, seconds[:, None]], axis=1)
        work /= np.maximum(work.sum(axis=0), 1e-30)
        work[:, -1] *= 2.0
        idle = np.zeros((1, work.shape[1]))  # row -1
        assigned = np.full_like(members, -2)  # -2: free
        _even_out(members, np.concatenate([work, idle]), np.zeros((world_size, work.shape[1])), assigned)
        members = assigned
    return np.ascontiguousarray(members.T)


@numba.njit(cache=True)
def _even_out(members, work, loads, assigned):
    """Assign each row of `members` to ranks; exchange while that lowers the sum of the squared loads."""
    columns, ranks = members.shape
    parts = work.shape[1]
    for column in range(columns):
        for i in range(ranks):  # costliest first, each to the rank that has least of what it brings
            member, best, best_score = members[column, i], -1, 0.0
            for rank in range(ranks):
                if assigned[column, rank] == -2:
                    score = 0.0
                    for part in range(parts):
                        score += loads[rank, part] * work[member, part]
                    if best < 0 or score < best_score:
                        best, best_score = rank, score
            assigned[column, best] = member
            for part in range(parts):
                loads[best, part] += work[member, part]
    for _ in range(_MAX_SWEEPS):
        improved = False
        for column in range(columns):
            for a in range(ranks):
                for b in range(a):
                    first, second, change = assigned[column, a], assigned[column, b], 0.0
                    for part in range(parts):
                        moved = work[second, part] - work[first, part]
                        change += moved * (loads[a, part] - loads[b, part] + moved)
                    if change < -1e-15:
                        assigned[column, a], assigned[column, b] = second, first
                        for part in range(parts):
                            moved = work[second, part] - work[first, part]
                            loads[a, part] += moved
                            loads[b, part] -= moved
                        improved = True
        if not improved:
            break
