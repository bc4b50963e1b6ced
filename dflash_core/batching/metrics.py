"""What a plan is worth, measured: mixing, pairs that meet again, balance of ranks, supervised tokens.

Mixing is a ratio of variances: the share of the samples' variance that lies between groups (microbatches or
steps), divided by what groups of the same sizes would show if samples were drawn at random. 1 = like i.i.d.;
above 1 = clumped (a length-sorted microbatch of 30 samples: up to 30); below 1 = spread more evenly than
chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cost import REFERENCE, CostModel

if TYPE_CHECKING:
    from dflash_core.batching.plan import BatchPlan

_MAX_STEPS = 512  # rank balance: steps looked at, evenly spaced


def plan_metrics(
    plan: BatchPlan,
    *,
    source_id: NDArray[np.int16] | None = None,
    num_supervised: NDArray[np.int32] | None = None,
    previous: BatchPlan | None = None,
    world_size: int = 8,
    model: CostModel = REFERENCE,
) -> dict[str, float]:
    """Every number of this file for one plan, by name: what reports show and MLflow logs.

    Args:
        plan: the plan.
        source_id: int16[N], source of each sample; adds mixing by source.
        num_supervised: int32[N]; adds supervised tokens of a step.
        previous: the plan of the epoch before, over the same samples; adds repeated pairs and identical
        microbatches.
        world_size: ranks, for the balance.
        model: seconds of the balance.
    """
    report = plan.report()
    out = {name: float(value) for name, value in report.items() if isinstance(value, int | float)}
    if source_id is not None:
        step_of = plan.step_of_microbatch()
        out["source_mixing_microbatch"] = source_mixing(plan, source_id, np.arange(plan.num_microbatches))
        out["source_mixing_step"] = source_mixing(plan, source_id, step_of)
    if num_supervised is not None:
        supervised = supervised_per_step(plan, num_supervised)
        out["supervised_tokens_per_step"] = float(supervised.mean()) if len(supervised) else 0.0
        out["supervised_tokens_per_step_min"] = float(supervised.min(initial=0))
        out["supervised_tokens_per_step_max"] = float(supervised.max(initial=0))
    if previous is not None:
        out["repeated_pair_share"] = repeated_pair_share(previous, plan)
        out["identical_microbatch_share"] = identical_microbatch_share(previous, plan)
    out |= {f"balance_{part}": value for part, value in rank_balance(plan, world_size, model).items()}
    return out


def mixing(
    group_of_microbatch: NDArray[np.integer],
    *,
    samples: NDArray[np.int64],
    sums: NDArray[np.int64],
    squares: NDArray[np.int64],
) -> float:
    """Variance between groups over its i.i.d. value, from sums over each microbatch.

    Lengths 1 1 | 3 3 (two groups): all variance lies between them, share 1; i.i.d. share (2 - 1) / (4 - 1):
    3.0. Lengths 1 3 | 1 3: 0.0. With fewer than two groups, or all lengths equal, there is nothing to mix:
    1.0.

    Args:
        group_of_microbatch: int[n], microbatch -> group, groups numbered from 0.
        samples, sums, squares: int64[n], samples of each microbatch, sum of their lengths and of their
        squares.
    """
    if len(samples) == 0:
        return 1.0
    group_samples = np.bincount(group_of_microbatch, weights=samples)
    group_sums = np.bincount(group_of_microbatch, weights=sums)
    group_samples, group_sums = group_samples[group_samples > 0], group_sums[group_samples > 0]
    return _ratio(group_samples, group_sums[:, None], np.array([float(squares.sum())]))


def _ratio(group_samples: NDArray[Any], group_sums: NDArray[Any], squares: NDArray[Any]) -> float:
    """The ratio for p quantities at once: group_sums [g, p], squares [p] (sum over all samples)."""
    n, groups = group_samples.sum(), len(group_samples)
    centre = group_sums.sum(axis=0) ** 2 / n
    within_all = (squares - centre).sum()
    if groups < 2 or n <= groups or within_all <= 1e-9 * squares.sum():
        return 1.0
    between = ((group_sums**2 / group_samples[:, None]).sum(axis=0) - centre).sum()
    return float(between / within_all * (n - 1) / (groups - 1))


def source_mixing(
    plan: BatchPlan, source_id: NDArray[np.integer], group_of_microbatch: NDArray[np.integer]
) -> float:
    """`mixing` of which source a sample comes from, all sources together; groups of microbatches as given."""
    if plan.num_microbatches == 0:
        return 1.0
    num_sources = int(source_id.max()) + 1
    group_of_sample = np.repeat(np.asarray(group_of_microbatch, np.int64), plan.samples_per_microbatch)
    num_groups = int(group_of_sample.max()) + 1
    counts = np.bincount(
        group_of_sample * num_sources + source_id[plan.order], minlength=num_groups * num_sources
    ).reshape(num_groups, num_sources)
    return _ratio(counts.sum(axis=1), counts.astype(np.float64), counts.sum(axis=0).astype(np.float64))


def repeated_pair_share(previous: BatchPlan, plan: BatchPlan) -> float:
    """Share of the pairs of samples that share a microbatch in `plan` and shared one in `previous` too.

    Previous [0 1 2] [3 4], now [0 1] [2 3 4]: pairs now 01 23 24 34, met before 01 34: 0.5.
    """
    before = np.empty(len(plan.order), np.int64)
    before[previous.order] = np.repeat(np.arange(previous.num_microbatches), previous.samples_per_microbatch)
    now = np.repeat(np.arange(plan.num_microbatches), plan.samples_per_microbatch)
    together = np.sort(now * max(previous.num_microbatches, 1) + before[plan.order])
    bounds = np.flatnonzero(np.diff(together, prepend=-1, append=-1))
    met = np.diff(bounds).astype(np.float64)
    pairs = plan.samples_per_microbatch.astype(np.float64)
    total = (pairs * (pairs - 1)).sum()
    return float((met * (met - 1)).sum() / total) if total else 0.0


def identical_microbatch_share(previous: BatchPlan, plan: BatchPlan) -> float:
    """Share of the microbatches of `plan` whose set of samples was a microbatch of `previous`."""
    if plan.num_microbatches == 0:
        return 0.0
    before = np.empty(len(plan.order), np.int64)
    before[previous.order] = np.repeat(np.arange(previous.num_microbatches), previous.samples_per_microbatch)
    from_before = before[plan.order]
    first = from_before[plan.offsets[:-1]]
    stray = from_before != np.repeat(first, plan.samples_per_microbatch)
    whole = np.add.reduceat(stray, plan.offsets[:-1]) == 0
    same_size = previous.samples_per_microbatch[first] == plan.samples_per_microbatch
    return float((whole & same_size).mean())


def supervised_per_step(plan: BatchPlan, num_supervised: NDArray[np.int32]) -> NDArray[np.int64]:
    """Supervised tokens of each step: int64[s]."""
    if plan.num_steps == 0:
        return np.zeros(0, np.int64)
    return np.add.reduceat(num_supervised[plan.order], plan.offsets[plan.step_offsets[:-1]], dtype=np.int64)


def rank_balance(plan: BatchPlan, world_size: int, model: CostModel = REFERENCE) -> dict[str, float]:
    """Largest over mean load of the ranks of a step, averaged over steps; 1 = nobody waits.

    Returns:
        seconds: predicted seconds of the whole step. lockstep: the same when ranks wait for each other after
        every microbatch. target_slots, attention, draft_slots: each kind of work alone. Over at most 512
        steps.
    """
    names = ("seconds", "lockstep", "target_slots", "attention", "draft_slots")
    if plan.num_steps == 0:
        return dict.fromkeys(names, 1.0)
    seconds = model.seconds(plan.work)
    loads = np.stack([seconds, plan.work.slots, plan.work.pairs, plan.work.draft_slots], axis=1)
    loads = np.concatenate([loads, np.zeros((1, 4))])  # row -1: idle
    steps = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, _MAX_STEPS)).astype(np.int64))
    ratios = np.ones((len(steps), len(names)))
    for row, step in zip(ratios, steps):
        dealt = loads[plan.deal_step(world_size, int(step))]  # [ranks, k, 4]
        totals = dealt.sum(axis=1)
        whole = np.maximum(totals.mean(axis=0), 1e-30)
        row[[0, 2, 3, 4]] = np.where(totals.any(axis=0), totals.max(axis=0) / whole, 1.0)
        row[1] = dealt[:, :, 0].max(axis=0).sum() / whole[0]
    return dict(zip(names, ratios.mean(axis=0).tolist()))
