"""A batch plan: which samples run together, and when, for one epoch.

`build_plan` is a pure function of lengths, settings, seed and epoch, the same on every machine. Nothing is
replayed after a restart: the plan is built or read again, and a microbatch is a slice of it.

    order          7 2 | 4 0 1 | 3 5 | 6        samples
    offsets        0     2       5     7  8     microbatches
    step_offsets   0             2        4     steps (of microbatches)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.batching.cores import on_all_cores
from dflash_core.batching.cost import REFERENCE, Work
from dflash_core.batching.cutting import Cut, cut_microbatches
from dflash_core.batching.ordering import (
    assign_to_ranks,
    close_steps,
    interleave,
    random_order,
    take_microbatches,
)
from dflash_core.batching.randomness import stream_key
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig, check_budget
from dflash_core.errors import UserError
from dflash_core.files import new_hasher


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """Microbatches and optimizer steps of one epoch, in execution order.

    order: int32[N], positions in the lengths that were given.
    offsets: int64[n + 1], microbatches over `order`.
    step_offsets: int64[s + 1], steps over microbatches.
    widths: int32[n], 0 = packed, else the padded row length.
    tokens, squared_lengths, draft_slots, draft_pairs: int64[n], sums over the samples of a microbatch of
    length, length^2, draft slots, draft slots * length.
    dropped: number of samples left out, by reason. Nothing is dropped here: samples that cannot be trained on
    are rejected at ingest.
    """

    order: NDArray[np.int32]
    offsets: NDArray[np.int64]
    step_offsets: NDArray[np.int64]
    widths: NDArray[np.int32]
    tokens: NDArray[np.int64]
    squared_lengths: NDArray[np.int64]
    draft_slots: NDArray[np.int64]
    draft_pairs: NDArray[np.int64]
    config: BatchingConfig
    seed: int
    epoch: int
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        return len(self.widths)

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @cached_property
    def digest(self) -> str:
        """Digest of everything that is executed: samples, microbatches, steps and widths; 32 hex digits."""
        state = new_hasher()
        for name, dtype in (("order", "<i4"), ("offsets", "<i8"), ("step_offsets", "<i8"), ("widths", "<i4")):
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            state.update(f"{name}:{len(array)};".encode())
            state.update(array.data)
        return state.hexdigest()

    @cached_property
    def samples_per_microbatch(self) -> NDArray[np.int64]:
        """Number of samples of each microbatch, int64[n]."""
        return np.diff(self.offsets)

    @cached_property
    def work(self) -> Work:
        """Counted work of each microbatch."""
        packed = self.widths == 0
        rows, widths = self.samples_per_microbatch, self.widths.astype(np.int64)
        return Work(
            slots=np.where(packed, self.tokens, rows * widths),
            pairs=np.where(packed, self.squared_lengths, rows * widths * widths),
            tokens=self.tokens,
            draft_slots=self.draft_slots,
            draft_pairs=self.draft_pairs,
        )

    def samples(self, microbatch: int) -> NDArray[np.int32]:
        """Return the samples of one microbatch, in row order."""
        return self.order[self.offsets[microbatch] : self.offsets[microbatch + 1]]

    def step_of_microbatch(self) -> NDArray[np.int32]:
        """Return the step of each microbatch, int32[n]."""
        return np.repeat(np.arange(self.num_steps, dtype=np.int32), np.diff(self.step_offsets))

    def assign_to_ranks(self, world_size: int, step: int) -> NDArray[np.int32]:
        """Return the microbatch numbers of every rank in one step (see `ordering.assign_to_ranks`).

        Returns:
            int32[world_size, k]; -1 = idle.
        """
        first, last = int(self.step_offsets[step]), int(self.step_offsets[step + 1])
        work = Work(**{name: array[first:last] for name, array in vars(self.work).items()})
        numbers = assign_to_ranks(REFERENCE.seconds(work), work.matrix(), world_size)
        return np.where(numbers >= 0, numbers + np.int32(first), np.int32(-1)).astype(np.int32)

    def for_rank(self, rank: int, world_size: int, step: int) -> NDArray[np.int32]:
        """Return the microbatch numbers that `rank` runs in `step`.

        Returns:
            int32[k], k equal on all ranks; -1 = idle: zero weight, takes part in collectives.
        """
        assert 0 <= rank < world_size and 0 <= step < self.num_steps, (rank, world_size, step)
        return self.assign_to_ranks(world_size, step)[rank]


def build_plan(
    lengths: ArrayLike,
    config: BatchingConfig,
    *,
    seed: int,
    epoch: int,
    draft_slots: ArrayLike | None = None,
) -> BatchPlan:
    """Plan one epoch.

    Args:
        lengths: int32[N], tokens of each training sample.
        config: strategy, budget, step size.
        seed, epoch: decide every random choice. Epochs differ in order, and in composition where the strategy
            redraws.
        draft_slots: int32[N], min(num_anchors, eligible) * block size of each sample; None: not counted.

    Returns:
        Every sample exactly once; no microbatch over `config.token_budget`; steps of at least
        `config.tokens_per_step` real tokens, except that the last may be smaller.

    Raises:
        UserError: a length below 1 or above the budget; given edges that do not fit.
    """
    lengths = _int32_values("lengths", lengths, low=1)
    slots = lengths[:0] if draft_slots is None else _int32_values("draft_slots", draft_slots, low=0)
    if draft_slots is not None and len(slots) != len(lengths):
        allowed = f"one per sample ({len(lengths)})"
        raise UserError(f"draft_slots: {len(slots)} values are not allowed; allowed: {allowed}")
    check_budget(config.token_budget, longest=int(lengths.max(initial=0)))
    cut = cut_microbatches(lengths, config, seed=seed, epoch=epoch)
    sums = _sums(cut.order, cut.offsets, cut.lengths, slots)
    chosen = _execution_order(cut, sums[0], config, key=stream_key(seed, epoch, "microbatches"))
    order, offsets = take_microbatches(cut.order, cut.offsets, chosen)
    tokens, squared, drafts, pairs, longest_rows = sums[:, chosen]
    return BatchPlan(
        order=order,
        offsets=offsets,
        step_offsets=close_steps(tokens, config.tokens_per_step),
        widths=_widths(longest_rows, cut.static_edges, is_packed=STRATEGIES[config.strategy].is_packed),
        tokens=tokens,
        squared_lengths=squared,
        draft_slots=drafts,
        draft_pairs=pairs,
        config=config,
        seed=seed,
        epoch=epoch,
    )


def _int32_values(name: str, values: ArrayLike, *, low: int) -> NDArray[np.int32]:
    """Return `values` as int32[N].

    Raises:
        UserError: not a list of whole numbers, or one outside of `low` to the largest int32.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        given = f"{array.dtype}{list(array.shape)}"
        raise UserError(f"{name}: {given} is not allowed; allowed: one whole number per sample")
    high = np.iinfo(np.int32).max
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        where = int(np.flatnonzero((array < low) | (array > high))[0])
        raise UserError(f"{name}[{where}]: {array[where]} is not allowed; allowed: {low} to {high}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _execution_order(
    cut: Cut, tokens: NDArray[np.int64], config: BatchingConfig, *, key: np.uint64
) -> NDArray[np.int64]:
    """Return the numbers of the microbatches, with `tokens` tokens each, in execution order: int64[n]."""
    n = len(tokens)
    if config.order == "random" or not STRATEGIES[config.strategy].redraws:
        return random_order(n, key)
    per_step = -(-config.tokens_per_step * n // max(int(tokens.sum()), 1))
    return interleave(tokens / np.diff(cut.offsets), per_step=per_step, key=key)


def _widths(
    longest_rows: NDArray[np.int64], static_edges: NDArray[np.int32] | None, *, is_packed: bool
) -> NDArray[np.int32]:
    """Return the padded row length of each microbatch, 0 where it is packed: int32[n]."""
    if is_packed:
        return np.zeros(len(longest_rows), np.int32)
    if static_edges is not None:
        return static_edges[np.searchsorted(static_edges, longest_rows)].astype(np.int32)
    return longest_rows.astype(np.int32)


def _sums(
    order: NDArray[np.int32],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int32],
    draft_slots: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return int64[5, n]: sums of length, length^2, draft slots, draft slots * length; the longest sample."""
    out = np.zeros((5, len(offsets) - 1), np.int64)

    def add_up(first: int, last: int) -> None:
        _add_up(out, order, offsets, lengths, draft_slots, first, last)

    on_all_cores(len(offsets) - 1, len(order), add_up)
    return out


@numba.njit(cache=True, nogil=True)
def _add_up(out, order, offsets, lengths, draft_slots, first, last):
    counted = len(draft_slots) > 0
    for microbatch in range(first, last):
        for i in range(offsets[microbatch], offsets[microbatch + 1]):
            length = np.int64(lengths[i])
            out[0, microbatch] += length
            out[1, microbatch] += length * length
            if counted:
                slots = np.int64(draft_slots[order[i]])
                out[2, microbatch] += slots
                out[3, microbatch] += slots * length
            if length > out[4, microbatch]:
                out[4, microbatch] = length
