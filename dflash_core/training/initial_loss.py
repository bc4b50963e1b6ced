"""Mean loss of the first weights over a whole epoch of a run's plan, without training.

Strategies differ in which samples share a microbatch, never in which samples and anchors an epoch holds, so
this number must be the same for all of them up to rounding, and `anchor_digest` exactly the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.model.loss import LossSums, TargetHeads
from dflash_core.training import setup
from dflash_core.training.capture import make_capture
from dflash_core.training.feed import Assignment, Microbatch, Prefetcher, build_microbatch
from dflash_core.training.setup import Run
from dflash_core.training.topology import Layout
from dflash_core.training.validation import LossArguments, loss_of
from dflash_core.training.world import World, pick_device


def initial_loss(
    run_json: Path | str, *, epoch: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Sum of weight * loss over sum of weight, for the weights that training would start from.

    Args:
        run_json: of a run; its directory need not have been trained, and nothing is written there but a cache
            on
            disk, if the run asks for one.
        epoch: whose plan and anchors.
        on_progress: called with (microbatches done, all).

    Returns:
        `loss`, `weight_sum`, `num_blocks`, `num_samples`, `num_tokens`, and `anchor_digest` over all samples
        with their anchors in the order of the token store.
    """
    run = Run.load(Path(run_json))
    config, device = run.config, pick_device(run.config.training)
    world = World(Layout(False, (((0,), (0,)),)), 0, device, None, None, None)
    schedule = run.open_schedule(run.open_store())
    dtypes = setup.pick_dtypes(run, world, None)
    target_config = setup.load_target_config(run)
    ids = setup.layer_ids(run, target_config)
    target = setup.load_target(run, world, ids, dtypes)
    spec = setup.feature_spec(run, target_config, ids, dtypes)
    fingerprint = run.facts(schedule)["inputs"]["target"]
    capture, _ = make_capture(target, config.target, config.objective, schedule, spec, run.cache, fingerprint)
    drafter = setup.build_drafter(run, target_config, ids, device)
    heads = TargetHeads(target.embed_weight.to(dtypes["drafter"]), target.head_weight.to(dtypes["drafter"]))
    mask, slots = drafter.shape.mask_token_id, config.training.max_draft_slots
    same = LossArguments(heads, config.objective, mask, slots, device)
    sums = LossSums.zeros(drafter.shape.block_size, device)
    anchors: dict[int, bytes] = {}
    num_tokens = 0
    total = schedule.plan(epoch).num_microbatches
    feed = Prefetcher(
        _assignments(epoch, total), lambda a: _microbatch(run, schedule, a), config.training.prefetch
    )
    try:
        for assignment, microbatch in feed:
            with torch.no_grad():
                sums = sums + loss_of(drafter, microbatch, capture(microbatch), same, backward=False)
            num_tokens += microbatch.num_tokens
            for i, row in enumerate(microbatch.sample_rows):
                mine = microbatch.anchors[microbatch.anchor_sample == i] - microbatch.cu_seqlens[i]
                anchors[int(row)] = mine.astype("<i4").tobytes()
            if on_progress is not None:
                on_progress(assignment.microbatch + 1, total)
    finally:
        feed.close()
    digest = hashlib.blake2b(digest_size=16)
    for row in sorted(anchors):
        digest.update(np.array([row, len(anchors[row])], "<i8").tobytes() + anchors[row])
    return {
        "loss": sums.loss(),
        "weight_sum": float(sums.weight_sum),
        "num_blocks": int(sums.num_blocks),
        "num_samples": len(anchors),
        "num_tokens": num_tokens,
        "anchor_digest": digest.hexdigest(),
    }


def _assignments(epoch: int, num_microbatches: int) -> Iterator[Assignment]:
    return (Assignment(0, m, epoch, m, 0, 0) for m in range(num_microbatches))


def _microbatch(run: Run, schedule: Any, assignment: Assignment) -> Microbatch:
    rows, width = schedule.rows(assignment.epoch, assignment.microbatch)
    return build_microbatch(
        schedule.store,
        rows,
        width,
        num_anchors=run.config.objective.num_anchors,
        seed=run.config.training.seed,
        epoch=assignment.epoch,
    )
