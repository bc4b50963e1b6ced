"""A batch plan: which samples run together, and when, for one epoch.

`build_plan` is a pure function of lengths, settings, seed and epoch, the same on every machine. Nothing is
replayed
after a restart: the plan is built or read again, and a microbatch is a slice of it.

    order          7 2 | 4 0 1 | 3 5 | 6        samples
    offsets        0     2       5     7  8     microbatches
    step_offsets   0             2        4     steps (of microbatches)
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dflash_core.batching.cores import on_all_cores
from dflash_core.batching.cost import REFERENCE, Work
from dflash_core.batching.metrics import mixing
from dflash_core.batching.ordering import close_steps, deal, interleave, random_order, take_microbatches
from dflash_core.batching.randomness import stream_key
from dflash_core.batching.strategies import cut_microbatches
from dflash_core.config import BatchingConfig, to_dict
from dflash_core.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """Microbatches and optimizer steps of one epoch, in execution order.

    order: int32[N], positions in the lengths that were given. offsets: int64[n + 1], microbatches over
    `order`.
    step_offsets: int64[s + 1], steps over microbatches. widths: int32[n], 0 = packed, else the padded row
    length.
    tokens, squared_lengths, draft_slots, draft_pairs: int64[n], sums over the samples of a microbatch of
    length, length^2, draft slots, draft slots * length.
    dropped: samples left out, by reason. Nothing is dropped here; what cannot be trained on is rejected at
    ingest.
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
        """32 hex digits over what is executed: samples, microbatches, steps and widths."""
        state = hashlib.blake2b(digest_size=16)
        for name, dtype in (("order", "<i4"), ("offsets", "<i8"), ("step_offsets", "<i8"), ("widths", "<i4")):
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            state.update(f"{name}:{len(array)};".encode())
            state.update(array.data)
        return state.hexdigest()

    @cached_property
    def samples_per_microbatch(self) -> NDArray[np.int64]:
        """int64[n]"""
        return np.diff(self.offsets)

    @cached_property
    def work(self) -> Work:
        """What each microbatch costs, counted."""
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
        """Samples of one microbatch, in row order."""
        return self.order[self.offsets[microbatch] : self.offsets[microbatch + 1]]

    def step_of_microbatch(self) -> NDArray[np.int32]:
        """int32[n]"""
        return np.repeat(np.arange(self.num_steps, dtype=np.int32), np.diff(self.step_offsets))

    def deal_step(self, world_size: int, step: int) -> NDArray[np.int32]:
        """Microbatch numbers of every rank in one step: int32[world_size, k], -1 = idle (see
        `ordering.deal`).
        """
        first, last = int(self.step_offsets[step]), int(self.step_offsets[step + 1])
        work = Work(**{name: array[first:last] for name, array in vars(self.work).items()})
        dealt = deal(REFERENCE.seconds(work), work.matrix(), world_size)
        return np.where(dealt >= 0, dealt + np.int32(first), np.int32(-1)).astype(np.int32)

    def for_rank(self, rank: int, world_size: int, step: int) -> NDArray[np.int32]:
        """Microbatch numbers that `rank` runs in `step`.

        Returns:
            int32[k], k equal on all ranks; -1 = idle: zero weight, takes part in collectives.
        """
        assert 0 <= rank < world_size and 0 <= step < self.num_steps, (rank, world_size, step)
        return self.deal_step(world_size, step)[rank]

    def report(self) -> dict[str, Any]:
        """What a person wants to know, as JSON types; `metrics.plan_metrics` adds what needs the samples."""
        work = self.work
        packed = self.config.strategy == "packed"
        room = self.num_microbatches * self.config.token_budget
        slots = room if packed else int(work.slots.sum())
        tokens = int(self.tokens.sum())
        step_tokens = (
            np.add.reduceat(self.tokens, self.step_offsets[:-1]) if self.num_steps else self.tokens[:0]
        )
        step_of = self.step_of_microbatch()
        rows = self.samples_per_microbatch
        sums = {"samples": rows, "sums": self.tokens, "squares": self.squared_lengths}
        tail_short = bool(self.num_steps) and int(step_tokens[-1]) < self.config.tokens_per_step
        return {
            "strategy": self.config.strategy,
            "seed": self.seed,
            "epoch": self.epoch,
            "digest": self.digest,
            "num_samples": len(self.order),
            "num_microbatches": self.num_microbatches,
            "num_steps": self.num_steps,
            "num_tokens": tokens,
            "num_slots": slots,
            "num_draft_slots": int(self.draft_slots.sum()),
            "padding_efficiency": tokens / slots if slots else 1.0,
            "fill": tokens / room if room else 1.0,
            "num_shapes": 1 if packed else np.unique(np.stack([rows, self.widths]), axis=1).shape[1],
            "mixing_microbatch": mixing(np.arange(self.num_microbatches), **sums),
            "mixing_step": mixing(step_of, **sums),
            "microbatches_per_step": float(np.diff(self.step_offsets).mean()) if self.num_steps else 0.0,
            "tokens_per_step": float(step_tokens.mean()) if self.num_steps else 0.0,
            "max_draft_slots_per_microbatch": int(self.draft_slots.max(initial=0)),
            "tail": "kept",
            "tail_step_tokens": int(step_tokens[-1]) if tail_short else 0,
            "dropped": dict(self.dropped),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as Parquet, one row a sample in execution order (see `storage`)."""
        from dflash_core.batching.storage import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> BatchPlan:
        """Read what `save` wrote; `UserError` when it is no plan or damaged."""
        from dflash_core.batching.storage import load_plan

        return load_plan(path)

    def describe(self) -> dict[str, Any]:
        """What identifies the plan's origin, as JSON types: settings, seed, epoch, dropped."""
        return {
            "config": json.loads(json.dumps(to_dict(self.config))),
            "seed": self.seed,
            "epoch": self.epoch,
            "dropped": dict(self.dropped),
        }


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
        seed, epoch: decide every random choice. Epochs differ in composition for all strategies but `sorted`,
        in
            order for all.
        draft_slots: int32[N], min(num_anchors, eligible) * block size of each sample; None: not counted.

    Returns:
        Every sample exactly once; no microbatch over `config.token_budget`; steps of at least
        `config.tokens_per_step` real tokens, except that the last may be smaller.

    Raises:
        UserError: a length below 1 or above the budget; given edges that do not fit.
    """
    lengths = _checked("lengths", lengths, low=1)
    slots = None if draft_slots is None else _checked("draft_slots", draft_slots, low=0)
    if slots is not None and len(slots) != len(lengths):
        raise UserError(
            f"draft_slots: {len(slots)} values are not allowed; allowed: one a sample ({len(lengths)})"
        )
    if len(lengths) and (longest := int(lengths.max())) > config.token_budget:
        raise UserError(
            f"batching.token_budget: {config.token_budget} is not allowed; allowed: at least the longest "
            f"sample's {longest} tokens (or a lower data.max_length)"
        )
    cut = cut_microbatches(lengths, config, seed=seed, epoch=epoch)
    sums = _sums(cut.order, cut.offsets, cut.lengths, lengths[:0] if slots is None else slots)
    key = stream_key(seed, epoch, "microbatches")
    n = len(cut.offsets) - 1
    if config.order == "random" or config.strategy == "sorted":
        chosen = random_order(n, key)
    else:
        per_step = -(-config.tokens_per_step * n // max(int(sums[0].sum()), 1))
        chosen = interleave(sums[0] / np.diff(cut.offsets), per_step=per_step, key=key)
    order, offsets = take_microbatches(cut.order, cut.offsets, chosen)
    tokens, squared, drafts, pairs, longest_row = sums[:, chosen]
    if config.strategy == "packed":
        longest_row = np.zeros_like(tokens)
    elif cut.static_edges is not None:
        longest_row = cut.static_edges[np.searchsorted(cut.static_edges, longest_row)]
    return BatchPlan(
        order=order,
        offsets=offsets,
        step_offsets=close_steps(tokens, config.tokens_per_step),
        widths=longest_row.astype(np.int32),
        tokens=tokens,
        squared_lengths=squared,
        draft_slots=drafts,
        draft_pairs=pairs,
        config=config,
        seed=seed,
        epoch=epoch,
    )


def _checked(name: str, values: ArrayLike, *, low: int) -> NDArray[np.int32]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(
            f"{name}: {array.dtype}{list(array.shape)} is not allowed; allowed: one whole number a sample"
        )
    if array.size and (int(array.min()) < low or int(array.max()) > np.iinfo(np.int32).max):
        where = int(np.flatnonzero((array < low) | (array > np.iinfo(np.int32).max))[0])
        raise UserError(f"{name}[{where}]: {array[where]} is not allowed; allowed: {low} to 2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def _sums(
    order: NDArray[np.int32],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int32],
    draft_slots: NDArray[np.int32],
) -> NDArray[np.int64]:
    """int64[5, n]: over each microbatch, sums of length, length^2, draft slots, draft slots * length; longest."""
    out = np.zeros((5, len(offsets) - 1), np.int64)
    on_all_cores(
        len(offsets) - 1,
        len(order),
        lambda first, last: _add_up(out, order, offsets, lengths, draft_slots, first, last),
    )
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
