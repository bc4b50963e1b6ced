"""Bucket edges that lose the fewest slots to padding: exact dynamic programming over a histogram of lengths.

Two costs of a bucket (a, b], both in padded slots:
- static shapes: every row is padded to b, so count * b;
- dynamic shapes: samples arrive in random order and are appended while rows * longest <= budget. By renewal
  reward a bucket costs count * E[n M] / E[n] slots, n the rows and M the width of a microbatch:
      E[n]   = sum_k F(B/k)^k
      E[n M] = sum_k k (G_k(B/k) - F(B/(k+1)) G_k(B/(k+1)))
      G_k(c) = E[M_k; M_k <= c] = c F(c)^k - sum_{x<c} F(x)^k
  with F the distribution of lengths inside the bucket and M_k the longest of k. The sample that overflowed, a
  long one, opens the next microbatch; the formula ignores that, so its efficiency is too high where few rows
  fit: by 0.4 points at 1 bucket and 0.3 at 6 for a budget of six times the longest, by 3.3 at 1, 1.0 at 4 and
  0.4 at 8 for four times; under 0.05 from 16 on. Plans report the efficiency that they reach.

The result is the optimum over edges on a grid of at most 256 cells (dynamic) or 1,024 (static); histograms
with fewer distinct lengths are solved exactly. All bucket counts up to K come out of one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.config import check_budget
from dflash_core.errors import UserError

Shapes = Literal["dynamic", "static"]
_CELLS = {"dynamic": 256, "static": 1024}
_NEGLIGIBLE = 1e-10  # probability that a microbatch grows further


@dataclass(frozen=True, kw_only=True)
class EdgeCurve:
    """Optimal edges and expected padding efficiency for 1, 2, ... buckets.

    edges[k - 1]: int32[k + 1]; efficiency: float64[K], real tokens / padded slots, never falling.
    """

    edges: tuple[NDArray[np.int32], ...]
    efficiency: NDArray[np.float64]

    @property
    def knee(self) -> int:
        """Smallest number of buckets whose doubling gains less than one point of efficiency."""
        last = len(self.efficiency)
        for k in range(1, last + 1):
            if self.efficiency[min(2 * k, last) - 1] - self.efficiency[k - 1] < 0.01:
                return k
        return last


def optimal_edges(
    values: ArrayLike,
    counts: ArrayLike,
    *,
    num_buckets: int,
    token_budget: int,
    shapes: Shapes = "dynamic",
) -> NDArray[np.int32]:
    """Return edges that minimise expected padded slots for a histogram of lengths.

    Args:
        values: distinct lengths, ascending, at least 1.
        counts: samples of each length.
        num_buckets: buckets wanted. Fewer are returned when there are fewer distinct lengths (or grid cells).
        token_budget: slots that a microbatch may hold.
        shapes: "dynamic" pads to the longest row, "static" to the bucket's edge.

    Returns:
        int32[k + 1], k <= num_buckets, strictly increasing from 0; bucket i holds lengths in (edges[i],
        edges[i + 1]].

    Raises:
        UserError: a length above the budget, or num_buckets below 1.
    """
    curve = edge_curve(values, counts, max_buckets=num_buckets, token_budget=token_budget, shapes=shapes)
    return curve.edges[-1]


def edges_of_lengths(
    lengths: NDArray[np.int32], *, num_buckets: int, token_budget: int, shapes: Shapes = "dynamic"
) -> NDArray[np.int32]:
    """Return the `optimal_edges` of lengths instead of their histogram."""
    if len(lengths) == 0:
        return np.array([0, 1], np.int32)
    counts = length_counts(lengths)
    values = np.flatnonzero(counts)
    return optimal_edges(
        values, counts[values], num_buckets=num_buckets, token_budget=token_budget, shapes=shapes
    )


def length_counts(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count the samples of each length: int64[longest + 1]."""
    # in chunks, because `bincount` copies its input to int64
    counts = np.zeros(int(lengths.max(initial=0)) + 1, np.int64)
    for start in range(0, len(lengths), 1 << 20):
        counts += np.bincount(lengths[start : start + (1 << 20)], minlength=len(counts))
    return counts


def edge_curve(
    values: ArrayLike, counts: ArrayLike, *, max_buckets: int, token_budget: int, shapes: Shapes = "dynamic"
) -> EdgeCurve:
    """Return optimal edges and expected efficiency for every number of buckets up to `max_buckets`.

    Arguments and errors are those of `optimal_edges`.
    """
    values, counts = np.asarray(values, np.int64), np.asarray(counts, np.int64)
    assert values.shape == counts.shape
    assert values.ndim == 1
    assert (np.diff(values) > 0).all()
    assert (counts >= 0).all()
    values, counts = values[counts > 0], counts[counts > 0]
    if max_buckets < 1:
        raise UserError(f"batching.num_buckets: {max_buckets!r} is not allowed; allowed: >= 1")
    if len(values) == 0:
        return EdgeCurve(edges=(np.array([0, 1], np.int32),), efficiency=np.ones(1))
    assert values[0] >= 1
    check_budget(token_budget, longest=int(values[-1]))
    bottoms, tops, cell_counts = _cells(values, counts, limit=_CELLS[shapes], token_budget=token_budget)
    if shapes == "static":
        cost = _static_costs(tops, cell_counts)
    else:
        cost = _dynamic_costs(bottoms, tops, cell_counts.astype(np.float64), token_budget)
    max_buckets = min(max_buckets, len(tops))
    total, previous = _best_splits(cost, max_buckets)
    edges = []
    for k in range(1, max_buckets + 1):
        cell, chosen = len(tops), []
        for buckets_left in range(k, 0, -1):
            chosen.append(tops[cell - 1])
            cell = previous[buckets_left - 1, cell]
        edges.append(np.array([0, *reversed(chosen)], np.int32))
    return EdgeCurve(edges=tuple(edges), efficiency=(values * counts).sum() / total)


def _cells(
    values: NDArray[np.int64], counts: NDArray[np.int64], *, limit: int, token_budget: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return smallest length, largest length and number of samples of each grid cell that holds samples.

    Lengths 3 5 9 with limit 2: cells 1..5 and 6..10 -> bottoms 1 6, tops 5 10 (10 is clipped to the budget).
    """
    if len(values) <= limit:
        return values, values, counts
    width = -(-int(values[-1]) // limit)
    used, first = np.unique((values - 1) // width, return_index=True)
    tops = np.minimum((used + 1) * width, token_budget)
    return used * width + 1, tops, np.add.reduceat(counts, first)


def _static_costs(tops: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return cost[i, j]: padded slots of cells i..j-1 as one bucket padded to its top."""
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((len(tops) + 1, len(tops) + 1), np.inf)
    in_bucket = before[None, :] - before[:, None]
    cost[:, 1:] = np.where(in_bucket[:, 1:] > 0, in_bucket[:, 1:] * tops[None, :].astype(np.float64), np.inf)
    return cost


@numba.njit(cache=True)
def _dynamic_costs(bottoms, tops, counts, budget):
    """Return cost[i, j]: expected padded slots of cells i..j-1 as one bucket (see the module docstring).

    Lengths are spread evenly inside a cell. Powers are repeated products, not `pow`: the same bits on every
    machine, so the same edges.
    """
    size = len(counts)
    cost = np.full((size + 1, size + 1), np.inf)
    share = np.empty(size)  # F at each cell's top, inside the bucket
    power = np.empty(size)  # share ** k
    for i in range(size):
        in_bucket = 0.0
        for j in range(i + 1, size + 1):
            in_bucket += counts[j - 1]
            below = 0.0
            k = budget // tops[j - 1]  # every microbatch has at least k rows
            for x in range(i, j):
                below += counts[x]
                share[x] = below / in_bucket
                power[x] = _power(share[x], k)
            rows, slots, reached = float(k), 0.0, 1.0
            while reached > _NEGLIGIBLE:
                _, longest = _up_to(budget // k, k, bottoms, tops, share, power, i, j)
                fits, longest_grown = _up_to(budget // (k + 1), k, bottoms, tops, share, power, i, j)
                slots += k * (longest - fits * longest_grown)
                k += 1
                reached = _power(fits, k)
                rows += reached
                for x in range(i, j):
                    power[x] *= share[x]
            cost[i, j] = in_bucket * slots / rows
    return cost


@numba.njit(cache=True)
def _power(base, exponent):
    value = 1.0
    while exponent > 0:
        if exponent & 1:
            value *= base
        base *= base
        exponent >>= 1
    return value


@numba.njit(cache=True)
def _up_to(limit, k, bottoms, tops, share, power, i, j):
    """Return F(limit) and E[M_k; M_k <= limit] of cells i..j-1, by the integral of F^k.

    F rises evenly inside a cell.
    """
    integral, share_before, power_before, reached = 0.0, 0.0, 0.0, bottoms[i]
    for x in range(i, j):
        if bottoms[x] > limit:
            break
        integral += (bottoms[x] - reached) * power_before
        share_x, power_x, reached = share[x], power[x], tops[x]
        if reached > limit:
            inside = (limit - bottoms[x]) / (tops[x] - bottoms[x])
            share_x = share_before + inside * (share_x - share_before)
            power_x, reached = _power(share_x, k), limit
        if share_x > share_before:
            rise = power_x * share_x - power_before * share_before
            mean_power = rise / ((k + 1) * (share_x - share_before))
            integral += (reached - bottoms[x]) * mean_power
        share_before, power_before = share_x, power_x
    integral += max(limit - reached, 0) * power_before
    return share_before, limit * power_before - integral


@numba.njit(cache=True)
def _best_splits(cost, max_buckets):
    """Return the least cost with k = 1..max_buckets buckets and, for each (k, j), the last bucket's start."""
    size = cost.shape[0] - 1
    totals = np.empty(max_buckets)
    previous = np.zeros((max_buckets, size + 1), np.int32)
    best = cost[0].copy()
    totals[0] = best[size]
    for k in range(1, max_buckets):
        new = np.full(size + 1, np.inf)
        for j in range(k + 1, size + 1):
            for i in range(k, j):
                value = best[i] + cost[i, j]
                if value < new[j]:
                    new[j] = value
                    previous[k, j] = i
        best = new
        totals[k] = best[size]
    return totals, previous
