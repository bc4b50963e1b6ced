"""Stage `plan`, one task per epoch: microbatches, steps, and their measured quality."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig, RunConfig, to_dict
from dflash_core.errors import UserError
from dflash_core.files import bytes_digest
from tasks.storage.pointers import PlanPointer, root_of
from tasks.storage.stages import stage

if TYPE_CHECKING:
    from dflash_core.batching.plan import BatchPlan

# epochs planned for strategies that are only compared: the least that shows repeated pairs
COMPARED_EPOCHS = 2
# Ranks that work less of their time are remarked on, or refused.
GOOD_EFFICIENCY, LEAST_EFFICIENCY = 0.95, 0.6
# Enough that ranks of a step even out.
MICROBATCHES_PER_RANK = 3

# Sources that the mixing metrics tell apart.
SHOWN_SOURCES = 1000


@dataclass(frozen=True)
class Lengths:
    """Lengths and other figures of the training samples, in the store's order."""

    lengths: np.ndarray  # int32 [N]
    draft_slots: np.ndarray  # int32 [N]
    # int16 [N], as `pooled_sources` returns it
    source_id: np.ndarray
    num_supervised: np.ndarray  # int32 [N]

    @property
    def digest(self) -> str:
        arrays = (self.lengths, self.draft_slots, self.source_id, self.num_supervised)
        return bytes_digest(*(np.ascontiguousarray(array).tobytes() + b"|" for array in arrays))


@functools.lru_cache(maxsize=4)
def read_lengths(
    shards: tuple[str, ...], validation_share: float, min_validation: int, num_anchors: int, block_size: int
) -> Lengths:
    """Read lengths, draft slots and sources of the training samples of some shards."""
    from dflash_core.anchors import draft_slots
    from dflash_core.data.store import TokenStore

    store = TokenStore.open(shards, validation_share=validation_share, min_validation_samples=min_validation)
    rows = store.train_indices
    return Lengths(
        lengths=store.lengths[rows],
        draft_slots=draft_slots(store.num_eligible[rows], num_anchors=num_anchors, block_size=block_size),
        source_id=pooled_sources(store.source_id[rows]),
        num_supervised=store.num_supervised[rows],
    )


def pooled_sources(source_id: NDArray[np.int32]) -> NDArray[np.int16]:
    """Return sources as int16; beyond `SHOWN_SOURCES` the smallest ones count as one together.

    Mixing by source takes a table of sources and microbatches, which 100,000 files would make too large.
    """
    counts = np.bincount(source_id)
    if len(counts) <= SHOWN_SOURCES:
        return source_id.astype(np.int16)
    ranks = np.empty(len(counts), np.int32)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.minimum(ranks, SHOWN_SOURCES - 1)[source_id].astype(np.int16)


def lengths_of(config: RunConfig, shards: Sequence[str]) -> Lengths:
    """Call `read_lengths` with a run's settings."""
    return read_lengths(
        tuple(shards),
        config.data.validation_share,
        config.data.min_validation_samples,
        config.objective.num_anchors,
        config.drafter.block_size,
    )


def plan_settings(batching: BatchingConfig, edges: Sequence[int]) -> dict[str, Any]:
    """Return the batching settings that decide a plan of this strategy, with the edges where it uses them."""
    settings = to_dict(replace(batching, edges=tuple(edges)))
    names = ("strategy", "token_budget", "tokens_per_step", "order", *STRATEGIES[batching.strategy].settings)
    return {name: settings[name] for name in names}


@stage(
    "plan",
    version=3,
    sources=("dflash_core.batching.metrics", "dflash_core.batching.storage"),
    locations=("arguments",),
)
def build_epoch(
    out: Path,
    *,
    lengths_digest: str,
    settings: dict[str, Any],
    seed: int,
    epoch: int,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Write epoch-NNN.parquet and metrics.json: efficiency, mixing, pairs repeated from the epoch before."""
    from dflash_core.batching.metrics import plan_metrics
    from dflash_core.batching.plan import build_plan
    from dflash_core.batching.storage import save_plan
    from dflash_core.config import from_dict

    samples = read_lengths(**{**arguments, "shards": tuple(arguments["shards"])})
    assert samples.digest == lengths_digest, "the shards changed between planning and now"
    config = from_dict(BatchingConfig, settings)
    build = functools.partial(build_plan, samples.lengths, config, seed=seed, draft_slots=samples.draft_slots)
    plan = build(epoch=epoch)
    previous = build(epoch=epoch - 1) if epoch > 0 else None
    save_plan(plan, out / f"epoch-{epoch:03d}.parquet")
    metrics = plan_metrics(
        plan, source_id=samples.source_id, num_supervised=samples.num_supervised, previous=previous
    )
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return {"plan_digest": plan.digest, "epoch": epoch, "strategy": config.strategy, "metrics": metrics}


def check_efficiency(efficiency: float, ranks: int, batching: BatchingConfig) -> str | None:
    """Return a remark for ranks that wait for each other, None where they hardly do.

    Args:
        efficiency: as `dflash_core.batching.metrics.rank_efficiency` predicts it.
        ranks: of the training.
        batching: settings of the plan.

    Raises:
        UserError: the efficiency is below `LEAST_EFFICIENCY`.
    """
    if efficiency >= GOOD_EFFICIENCY:
        return None
    # Half a budget less than whole microbatches: packs that are a little short make no further one.
    microbatches = MICROBATCHES_PER_RANK * ranks - 0.5
    budget, tokens = int(batching.tokens_per_step / microbatches), int(batching.token_budget * microbatches)
    text = (
        f"{ranks} ranks would work {efficiency:.0%} of their time, by the cost model, with "
        f"batching.token_budget {batching.token_budget} and tokens_per_step {batching.tokens_per_step}"
    )
    if batching.tokens_per_step >= tokens:
        text += "; microbatches of long samples cost less than those of short ones, which have more anchors"
    else:
        text += (
            f"; {MICROBATCHES_PER_RANK} microbatches per rank even out: batching.tokens_per_step={tokens}, "
            f"or at the same step size batching.token_budget={budget}, where the longest sample fits"
        )
    if efficiency < LEAST_EFFICIENCY:
        raise UserError(f"training.num_drafter_ranks: {text}")
    return text


def load_plan(config: RunConfig, pointer: PlanPointer) -> BatchPlan:
    """Read the plan of a pointer."""
    from dflash_core.batching import storage

    return storage.load_plan(plan_file(config, pointer))


def plan_file(config: RunConfig, pointer: PlanPointer) -> Path:
    """Return the Parquet file of a pointer's plan."""
    return root_of(config) / pointer["path"] / f"epoch-{pointer['epoch']:03d}.parquet"
