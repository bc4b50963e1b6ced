"""Stage `plan`, one task an epoch: which samples share a microbatch, which microbatches make a step, and how
good that is.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_core.config import BatchingConfig, DataConfig, RunConfig, to_dict
from tasks.storage.stages import stage

COMPARED_EPOCHS = 2  # plans made for strategies that are only compared: the least that shows repeated pairs

# Settings that change the plans of a strategy; the others are left out of the key.
_USED_BY = {
    "sorted": (),
    "sorted_fresh": ("sort_quantum",),
    "random": (),
    "bucketed": ("edges", "shapes"),
    "packed": ("pool_size",),
}


@dataclass(frozen=True)
class Lengths:
    """What plans are made of, in the store's order of training samples."""

    lengths: np.ndarray  # int32 [N]
    draft_slots: np.ndarray  # int32 [N]
    source_id: np.ndarray  # int16 [N]
    num_supervised: np.ndarray  # int32 [N]

    @property
    def digest(self) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for array in (self.lengths, self.draft_slots, self.source_id, self.num_supervised):
            hasher.update(np.ascontiguousarray(array).tobytes() + b"|")
        return hasher.hexdigest()


@functools.lru_cache(maxsize=4)
def read_lengths(
    shards: tuple[str, ...], validation_share: float, min_validation: int, num_anchors: int, block_size: int
) -> Lengths:
    """Lengths, draft slots and sources of the training samples of some shards."""
    from dflash_core.anchors import draft_slots
    from dflash_core.data.store import TokenStore

    store = TokenStore.open(shards, validation_share=validation_share, min_validation_samples=min_validation)
    rows = store.train_indices
    return Lengths(
        lengths=store.lengths[rows],
        draft_slots=draft_slots(store.num_eligible[rows], num_anchors=num_anchors, block_size=block_size),
        source_id=store.source_id[rows],
        num_supervised=store.num_supervised[rows],
    )


def lengths_of(config: RunConfig, shards: Sequence[str]) -> Lengths:
    """`read_lengths` with a run's settings."""
    data: DataConfig = config.data
    return read_lengths(
        tuple(shards),
        data.validation_share,
        data.min_validation_samples,
        config.objective.num_anchors,
        config.drafter.block_size,
    )


def plan_settings(batching: BatchingConfig, edges: Sequence[int]) -> dict[str, Any]:
    """The batching settings that decide a plan of this strategy, with the edges where it uses them."""
    settings = to_dict(replace(batching, edges=tuple(edges)))
    names = ("strategy", "token_budget", "tokens_per_step", "order", *_USED_BY[batching.strategy])
    return {name: settings[name] for name in names}


@stage("plan", version=3, sources=("dflash_core.batching",), locations=("arguments",))
def build_epoch(
    out: Path,
    *,
    lengths_digest: str,
    settings: dict[str, Any],
    seed: int,
    epoch: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Writes epoch-NNN.parquet and metrics.json: efficiency and mixing, and which pairs meet again after
    epoch - 1.
    """
    from dflash_core.batching import build_plan
    from dflash_core.batching.metrics import plan_metrics
    from dflash_core.config import from_dict

    found = read_lengths(**{**arguments, "shards": tuple(arguments["shards"])})
    assert found.digest == lengths_digest, "the shards changed between planning and now"
    config = from_dict(BatchingConfig, settings)
    plan = build_plan(found.lengths, config, seed=seed, epoch=epoch, draft_slots=found.draft_slots)
    previous = None
    if epoch > 0:
        previous = build_plan(
            found.lengths, config, seed=seed, epoch=epoch - 1, draft_slots=found.draft_slots
        )
    plan.save(out / f"epoch-{epoch:03d}.parquet")
    metrics = plan_metrics(
        plan, source_id=found.source_id, num_supervised=found.num_supervised, previous=previous
    )
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return {"plan_digest": plan.digest, "epoch": epoch, "strategy": config.strategy, "metrics": metrics}
