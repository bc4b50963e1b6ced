"""Quality of a plan, measured: mixing, repeated pairs, balance of ranks, supervised tokens.

Mixing is a ratio of variances: the share of the samples' variance that lies between groups (microbatches or
steps), divided by what groups of the same sizes would show if samples were drawn at random. 1 = like i.i.d.;
above 1 = clumped (a length-sorted microbatch of 30 samples: up to 30); below 1 = more even than by chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cost import REFERENCE, CostModel
from dflash_core.batching.plan import BatchPlan
from dflash_core.batching.strategies import STRATEGIES

_MAX_STEPS = 512  # evenly spaced steps that the balance of ranks averages over


def plan_report(plan: BatchPlan) -> dict[str, Any]:
    """Return the figures that need the plan alone, as JSON types; `plan_metrics` adds the others."""
    work = plan.work
    packed = STRATEGIES[plan.config.strategy].is_packed
    room = plan.num_microbatches * plan.config.token_budget
    slots = room if packed else int(work.slots.sum())
    tokens = int(plan.tokens.sum())
    step_tokens = np.add.reduceat(plan.tokens, plan.step_offsets[:-1]) if plan.num_steps else plan.tokens[:0]
    rows = plan.samples_per_microbatch
    sums = {"samples": rows, "sums": plan.tokens, "squares": plan.squared_lengths}
    last_is_short = bool(plan.num_steps) and int(step_tokens[-1]) < plan.config.tokens_per_step
    return {
        "strategy": plan.config.strategy,
        "seed": plan.seed,
        "epoch": plan.epoch,
        "digest": plan.digest,
        "num_samples": len(plan.order),
        "num_microbatches": plan.num_microbatches,
        "num_steps": plan.num_steps,
        "num_tokens": tokens,
        "num_slots": slots,
        "num_draft_slots": int(plan.draft_slots.sum()),
        "padding_efficiency": tokens / slots if slots else 1.0,
        "fill": tokens / room if room else 1.0,
        "num_shapes": 1 if packed else np.unique(np.stack([rows, plan.widths]), axis=1).shape[1],
        "mixing_microbatch": mixing(np.arange(plan.num_microbatches), **sums),
        "mixing_step": mixing(plan.step_of_microbatch(), **sums),
        "microbatches_per_step": float(np.diff(plan.step_offsets).mean()) if plan.num_steps else 0.0,
        "tokens_per_step": float(step_tokens.mean()) if plan.num_steps else 0.0,
        "max_draft_slots_per_microbatch": int(plan.draft_slots.max(initial=0)),
        "tail_step_tokens": int(step_tokens[-1]) if last_is_short else 0,
    }


def plan_metrics(
    plan: BatchPlan,
    *,
    source_id: NDArray[np.int16] | None = None,
    num_supervised: NDArray[np.int32] | None = None,
    previous: BatchPlan | None = None,
    world_size: int = 8,
    model: CostModel = REFERENCE,
) -> dict[str, float]:
    """Return every figure of this file for one plan, by name, as reports show and MLflow logs them.

    Args:
        plan: the plan.
        source_id: int16[N], source of each sample; adds mixing by source.
        num_supervised: int32[N]; adds supervised tokens per step.
        previous: the plan of the epoch before, over the same samples; adds repeated pairs and identical
            microbatches.
        world_size: ranks, for the balance.
        model: seconds of the balance.
    """
    out = {name: float(value) for name, value in plan_report(plan).items() if isinstance(value, int | float)}
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
    """Return the variance between groups over its i.i.d. value, from sums over each microbatch.

    Lengths 1 1 | 3 3 (two groups): all variance lies between them, share 1; i.i.d. share (2 - 1) / (4 - 1);
    returns 3.0. Lengths 1 3 | 1 3 return 0.0. Fewer than two groups, or equal lengths, cannot be mixed: 1.0.

    Args:
        group_of_microbatch: int[n], microbatch -> group, groups numbered from 0.
        samples, sums, squares: int64[n], number of samples, sum of lengths and sum of squared lengths.
    """
    if len(samples) == 0:
        return 1.0
    group_samples = np.bincount(group_of_microbatch, weights=samples)
    group_sums = np.bincount(group_of_microbatch, weights=sums)
    group_samples, group_sums = group_samples[group_samples > 0], group_sums[group_samples > 0]
    return _ratio(group_samples, group_sums[:, None], np.array([float(squares.sum())]))


def _ratio(group_samples: NDArray[Any], group_sums: NDArray[Any], squares: NDArray[Any]) -> float:
    """Return the ratio for p quantities at once: group_sums [g, p], squares [p] (sum over all samples)."""
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
    """Return `mixing` of the samples' sources, all sources together; groups of microbatches as given."""
    if plan.num_microbatches == 0:
        return 1.0
    num_sources = int(source_id.max()) + 1
    group_of_sample = np.repeat(np.asarray(group_of_microbatch, np.int64), plan.samples_per_microbatch)
    num_groups = int(group_of_sample.max()) + 1
    cell = group_of_sample * num_sources + source_id[plan.order]
    counts = np.bincount(cell, minlength=num_groups * num_sources).reshape(num_groups, num_sources)
    return _ratio(counts.sum(axis=1), counts.astype(np.float64), counts.sum(axis=0).astype(np.float64))


def repeated_pair_share(previous: BatchPlan, plan: BatchPlan) -> float:
    """Return the share of the pairs of samples in one microbatch of `plan` that shared one in `previous` too.

    Previous [0 1 2] [3 4], now [0 1] [2 3 4]: of the pairs 01 23 24 34, 01 and 34 shared one before: 0.5.
    """
    before = np.empty(len(plan.order), np.int64)
    before[previous.order] = np.repeat(np.arange(previous.num_microbatches), previous.samples_per_microbatch)
    now = np.repeat(np.arange(plan.num_microbatches), plan.samples_per_microbatch)
    together = np.sort(now * max(previous.num_microbatches, 1) + before[plan.order])
    bounds = np.flatnonzero(np.diff(together, prepend=-1, append=-1))
    repeated = np.diff(bounds).astype(np.float64)
    pairs = plan.samples_per_microbatch.astype(np.float64)
    total = (pairs * (pairs - 1)).sum()
    return float((repeated * (repeated - 1)).sum() / total) if total else 0.0


def identical_microbatch_share(previous: BatchPlan, plan: BatchPlan) -> float:
    """Return the share of the microbatches of `plan` whose set of samples was a microbatch of `previous`."""
    if plan.num_microbatches == 0:
        return 0.0
    before = np.empty(len(plan.order), np.int64)
    before[previous.order] = np.repeat(np.arange(previous.num_microbatches), previous.samples_per_microbatch)
    from_before = before[plan.order]
    first = from_before[plan.offsets[:-1]]
    is_elsewhere = from_before != np.repeat(first, plan.samples_per_microbatch)
    whole = np.add.reduceat(is_elsewhere, plan.offsets[:-1]) == 0
    same_size = previous.samples_per_microbatch[first] == plan.samples_per_microbatch
    return float((whole & same_size).mean())


def supervised_per_step(plan: BatchPlan, num_supervised: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the supervised tokens of each step: int64[s]."""
    if plan.num_steps == 0:
        return np.zeros(0, np.int64)
    return np.add.reduceat(num_supervised[plan.order], plan.offsets[plan.step_offsets[:-1]], dtype=np.int64)


def rank_balance(plan: BatchPlan, world_size: int, model: CostModel = REFERENCE) -> dict[str, float]:
    """Return largest over mean load of the ranks of a step, mean of at most 512 steps; 1 = no rank waits.

    Returns:
        The balance of five loads. `seconds`: predicted seconds of the whole step. `lockstep`: the same when
        ranks wait for each other after every microbatch. The others: one kind of work each.
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
        assigned = loads[plan.assign_to_ranks(world_size, int(step))]  # [ranks, k, 4]
        totals = assigned.sum(axis=1)
        whole = np.maximum(totals.mean(axis=0), 1e-30)
        row[[0, 2, 3, 4]] = np.where(totals.any(axis=0), totals.max(axis=0) / whole, 1.0)
        row[1] = assigned[:, :, 0].max(axis=0).sum() / whole[0]
    return dict(zip(names, ratios.mean(axis=0).tolist()))


def rank_efficiency(plan: BatchPlan, world_size: int, model: CostModel = REFERENCE) -> float:
    """Return the share of their time in which ranks work, when each step waits for its slowest rank.

    Predicted seconds of all ranks over `world_size` times those of the slowest rank, both summed over at most
    512 steps. Two ranks with steps of three equal microbatches: 3 / (2 * 2) = 0.75.
    """
    if plan.num_steps == 0:
        return 1.0
    # row -1: idle
    seconds = np.append(model.seconds(plan.work), 0.0)
    steps = np.unique(np.linspace(0, plan.num_steps - 1, min(plan.num_steps, _MAX_STEPS)).astype(np.int64))
    loads = [seconds[plan.assign_to_ranks(world_size, int(step))].sum(axis=1) for step in steps]
    slowest = sum(float(load.max()) for load in loads)
    return sum(float(load.sum()) for load in loads) / (world_size * slowest) if slowest else 1.0
