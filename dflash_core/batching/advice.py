"""Advice before any device time is spent: strategies compared, devices for target and drafter.

Pure functions that return plain dataclasses; a flow prints and plots them. The curve of efficiency against
the number of buckets, with its knee, is `buckets.edge_curve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cost import REFERENCE, CostModel, Prediction, predict
from dflash_core.batching.metrics import plan_metrics
from dflash_core.batching.plan import build_plan
from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import BatchingConfig
from dflash_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DeviceSplit:
    """Devices that capture and devices that train at the same time; `tokens_per_second` of all together."""

    num_target: int
    num_drafter: int
    tokens_per_second: float
    bound_by: str  # "target" or "drafter": the slower side
    waiting_share: float  # share of the devices' time spent waiting for the slower side


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One strategy on these lengths. `metrics` are those of `metrics.plan_metrics`, with repeated pairs."""

    strategy: str
    prediction: Prediction
    tokens_per_second: float  # of all devices
    hours: float  # all epochs
    metrics: dict[str, float]


def forecast_strategies(
    lengths: NDArray[np.int32],
    config: BatchingConfig,
    *,
    draft_slots: NDArray[np.int32] | None = None,
    source_id: NDArray[np.int16] | None = None,
    model: CostModel = REFERENCE,
    epochs: int = 1,
    num_devices: int = 1,
    seed: int = 0,
    strategies: Sequence[str] = tuple(STRATEGIES),
) -> list[Forecast]:
    """Plan two epochs of each strategy and predict its speed with `colocated` devices.

    The devices of a step wait for the slowest, so predicted seconds are multiplied by the rank balance.

    Returns:
        One forecast per strategy, fastest first.
    """
    out = []
    for strategy in strategies:
        chosen = replace(config, strategy=strategy)
        before = build_plan(lengths, chosen, seed=seed, epoch=0, draft_slots=draft_slots)
        plan = build_plan(lengths, chosen, seed=seed, epoch=1, draft_slots=draft_slots)
        metrics = plan_metrics(
            plan, source_id=source_id, previous=before, world_size=num_devices, model=model
        )
        prediction = predict(plan.work, model)
        seconds = prediction.seconds * metrics["balance_seconds"] / num_devices
        out.append(
            Forecast(
                strategy=strategy,
                prediction=prediction,
                tokens_per_second=prediction.num_tokens / seconds if seconds else 0.0,
                hours=epochs * seconds / 3600,
                metrics=metrics,
            )
        )
    return sorted(out, key=lambda forecast: -forecast.tokens_per_second)


def recommend(forecasts: list[Forecast], *, can_pack: bool = True) -> tuple[str, str]:
    """Return a strategy and the reason: the fastest with mixed steps and new microbatches in each epoch.

    Mixed: the mean length of a step varies at most 3 times as much as i.i.d. New: at most 2% of the pairs of
    samples in a microbatch share one again in the next epoch.

    Args:
        forecasts: fastest first, as `forecast_strategies` returns them.
        can_pack: False for targets that cannot run packed (linear-attention hybrids).

    Raises:
        UserError: the target cannot run packed, and all forecasts are of packed strategies.
    """
    allowed = [f for f in forecasts if can_pack or not STRATEGIES[f.strategy].is_packed]
    if not allowed:
        packed = ", ".join(f.strategy for f in forecasts)
        raise UserError(
            f"no strategy to recommend: the target cannot run packed, and only {packed} was planned"
        )
    mixed = [f for f in allowed if f.metrics["mixing_step"] <= 3 and f.metrics["repeated_pair_share"] <= 0.02]
    best = (mixed or allowed)[0]
    fastest = allowed[0]
    numbers = (
        f"{best.tokens_per_second:,.0f} tokens/s, "
        f"{best.metrics['padding_efficiency']:.1%} of slots hold tokens, "
        f"a step varies {best.metrics['mixing_step']:.2f} times as much as i.i.d., "
        f"{best.metrics['repeated_pair_share']:.2%} of pairs repeat in the next epoch"
    )
    if not mixed:
        return best.strategy, f"the fastest; none is well mixed on these lengths: {numbers}"
    if best is fastest:
        return best.strategy, f"the fastest, and well mixed: {numbers}"
    lost = 1 - best.tokens_per_second / fastest.tokens_per_second
    return best.strategy, f"well mixed at {lost:.1%} less speed than {fastest.strategy}: {numbers}"


def split_devices(num_devices: int, *, capture_rate: float, train_rate: float) -> list[DeviceSplit]:
    """Return all ways to divide devices between target and drafter, best first.

    7 devices at 10 and 30 thousand tokens/s each: 5 capture 50, 2 train 60 -> 50, bound by the target.

    Args:
        num_devices: at least 2.
        capture_rate, train_rate: tokens per second of one device that only captures, or only trains.

    Raises:
        UserError: fewer than two devices, or a rate that is not above 0.
    """
    if num_devices < 2 or not (capture_rate > 0 and train_rate > 0):
        raise UserError(
            f"devices to split: {num_devices} at {capture_rate} and {train_rate} tokens/s is not allowed; "
            "allowed: at least 2, rates above 0"
        )
    splits = []
    for num_target in range(1, num_devices):
        captured, trained = num_target * capture_rate, (num_devices - num_target) * train_rate
        rate = min(captured, trained)
        busy = num_target * rate / captured + (num_devices - num_target) * rate / trained
        splits.append(
            DeviceSplit(
                num_target=num_target,
                num_drafter=num_devices - num_target,
                tokens_per_second=rate,
                bound_by="target" if captured <= trained else "drafter",
                waiting_share=1 - busy / num_devices,
            )
        )
    return sorted(splits, key=lambda split: -split.tokens_per_second)
