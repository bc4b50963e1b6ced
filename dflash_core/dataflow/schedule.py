"""First stage of the dataflow: from batch plans and token store to microbatches.

The path of the data: `schedule` lists the samples of every microbatch, reads tokens and draws anchors;
`assignment` gives each microbatch of a step to the rank that captures it and the rank that trains on it;
`prefetch` builds a rank's microbatches ahead in a thread; `capture_cache` keeps captured states between
epochs; `transfer` captures on the same rank, or sends and receives states; `device_clock` measures the work.

Everything here is a function of the plans, the store, the seed and the epoch. There is no state to save: a
run that resumes at step s builds the microbatches from step s on.

Shape letters: T packed tokens, A anchors, n samples of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_core.anchors import draw_anchors
from dflash_core.batching.plan import BatchPlan
from dflash_core.batching.storage import load_plan
from dflash_core.data.store import TokenStore
from dflash_core.errors import UserError
from dflash_core.microbatch import Microbatch

VALIDATION_STEP = -1  # the step of assignments of validation
VALIDATION_EPOCH = 0  # validation anchors never change; training never draws anchors for these samples


def build_microbatch(
    store: TokenStore, rows: NDArray[np.int32], width: int, *, num_anchors: int, seed: int, epoch: int
) -> Microbatch:
    """Build the microbatch of the samples `rows` of the store, in that order (width 0: packed)."""
    token_ids, loss_mask, cu_seqlens = store.gather(rows)
    anchors, owner = [], []
    for i, row in enumerate(rows):
        first, end = int(cu_seqlens[i]), int(cu_seqlens[i + 1])
        drawn = draw_anchors(
            loss_mask[first:end],
            num_anchors=num_anchors,
            seed=seed,
            epoch=epoch,
            sample_id=store.sample_id(int(row)),
        )
        anchors.append(drawn + np.int32(first))
        owner.append(np.full(len(drawn), i, dtype=np.int32))
    return Microbatch(
        sample_rows=np.asarray(rows, dtype=np.int32),
        token_ids=token_ids.astype(np.int64),
        loss_mask=np.asarray(loss_mask, dtype=np.uint8),
        cu_seqlens=cu_seqlens.astype(np.int32),
        width=int(width),
        anchors=np.concatenate(anchors).astype(np.int32) if anchors else np.zeros(0, np.int32),
        anchor_sample=np.concatenate(owner) if owner else np.zeros(0, np.int32),
    )


class Schedule:
    """The plans of all epochs as one sequence of steps; at most two plans are in memory at a time.

    Args:
        store: the samples.
        plan_paths: one file per epoch.
        max_steps: end of the run before the end of the plans, or None.

    Raises:
        UserError: a plan is missing or belongs to other shards, or there is no step to train.
    """

    def __init__(self, store: TokenStore, plan_paths: Sequence[Path], max_steps: int | None) -> None:
        self.store, self.paths = store, [Path(p) for p in plan_paths]
        self._plans: dict[int, BatchPlan] = {}
        self.first_step = [0]  # of each epoch, and the end
        self.digests = []
        for epoch in range(len(self.paths)):
            plan = self.plan(epoch)
            self.first_step.append(self.first_step[-1] + plan.num_steps)
            self.digests.append(plan.digest)
            num_planned = int(plan.order.max()) + 1 if len(plan.order) else 0
            if num_planned > len(store.train_indices):
                raise UserError(
                    f"{self.paths[epoch]}: plan of {num_planned} or more samples, the shards hold "
                    f"{len(store.train_indices)} training samples; allowed: a plan built from these shards"
                )
            self._check_lengths(plan, self.paths[epoch])
        # What the plans and training.max_steps give; training.max_minutes may end the run earlier.
        self.planned_steps = min(self.first_step[-1], max_steps or self.first_step[-1])
        self.total_steps = self.planned_steps
        if self.total_steps < 1:
            raise UserError(f"plans {[str(p) for p in self.paths]}: no step to train; allowed: at least one")

    def _check_lengths(self, plan: BatchPlan, path: Path) -> None:
        """Check the tokens and widths of a plan's microbatches against the lengths of the samples.

        Raises:
            UserError: they differ.
        """
        lengths = self.store.lengths[self.store.train_indices[plan.order]]
        starts = plan.offsets[:-1]
        longest = np.maximum.reduceat(lengths, starts) if len(starts) else lengths[:0]
        tokens = np.add.reduceat(lengths, starts, dtype=np.int64) if len(starts) else lengths[:0]
        wrong = (tokens != plan.tokens) | ((plan.widths > 0) & (plan.widths < longest))
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise UserError(
                f"{path}: microbatch {i} has {plan.tokens[i]} tokens in rows of {plan.widths[i]} slots, the "
                f"samples have {tokens[i]} tokens, the longest {longest[i]}; allowed: a plan built from "
                "these shards"
            )

    def plan(self, epoch: int) -> BatchPlan:
        """Return an epoch's plan, read when it is first needed."""
        if epoch not in self._plans:
            if len(self._plans) > 1:
                self._plans.pop(next(iter(self._plans)))
            if not self.paths[epoch].is_file():
                raise UserError(
                    f"{self.paths[epoch]}: no such plan; allowed: the Parquet file of an epoch's plan"
                )
            self._plans[epoch] = load_plan(self.paths[epoch])
        return self._plans[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within the epoch) of a step of the run."""
        epoch = int(np.searchsorted(self.first_step, step, side="right")) - 1
        return epoch, step - self.first_step[epoch]

    def rows(self, epoch: int, microbatch: int) -> tuple[NDArray[np.int32], int]:
        """Return store rows and width of one microbatch."""
        plan = self.plan(epoch)
        first, end = plan.offsets[microbatch], plan.offsets[microbatch + 1]
        return self.store.train_indices[plan.order[first:end]], int(plan.widths[microbatch])

    def step_summary(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's batch over all ranks: samples, tokens, padding, lengths, sources."""
        epoch, local = self.locate(step)
        plan = self.plan(epoch)
        first, end = plan.step_offsets[local], plan.step_offsets[local + 1]
        rows = self.store.train_indices[plan.order[plan.offsets[first] : plan.offsets[end]]]
        tokens = int(plan.tokens[first:end].sum())
        return {
            "batch/num_samples": len(rows),
            "batch/tokens": tokens,
            "batch/padding_efficiency": tokens / int(plan.work.slots[first:end].sum()),
            "batch/mean_length": tokens / len(rows),
            "batch/supervised_tokens": int(self.store.num_supervised[rows].sum()),
            "batch/largest_source_share": int(np.bincount(self.store.source_id[rows]).max()) / len(rows),
        }


def validation_rows(store: TokenStore, num_samples: int) -> NDArray[np.int32]:
    """Return the first `num_samples` validation samples by content digest, stable when files are added."""
    ordered = sorted((store.sample_id(int(row)), int(row)) for row in store.validation_indices)
    return np.array([row for _, row in ordered[:num_samples]], dtype=np.int32)


def validation_groups(
    store: TokenStore, rows: NDArray[np.int32], *, token_budget: int, packed: bool
) -> list[tuple[NDArray[np.int32], int]]:
    """Cut validation rows, in order, into (rows, width) within the token budget; independent of the ranks."""
    groups: list[tuple[NDArray[np.int32], int]] = []
    current: list[int] = []
    longest = total = 0
    for row in rows:
        length = int(store.lengths[row])
        slots = total + length if packed else max(longest, length) * (len(current) + 1)
        if current and slots > token_budget:
            groups.append((np.array(current, np.int32), 0 if packed else longest))
            current, longest, total = [], 0, 0
        current.append(int(row))
        longest, total = max(longest, length), total + length
    if current:
        groups.append((np.array(current, np.int32), 0 if packed else longest))
    return groups
