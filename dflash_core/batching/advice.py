"""What to choose, before a device day is spent: strategies side by side, devices for target and drafter,
checks.

Pure functions that return plain dataclasses; a flow prints and plots them. The curve of efficiency against
the number of buckets, with its knee, is `buckets.edge_curve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_core.batching.cost import REFERENCE, CostModel, Prediction, Work, predict
from dflash_core.batching.metrics import plan_metrics
from dflash_core.batching.plan import build_plan
from dflash_core.config import BatchingConfig, Strategy
from dflash_core.errors import UserError

_CAPTURE_TERMS = ("capture_slot", "capture_pair", "capture_microbatch")


@dataclass(frozen=True, kw_only=True)
class DeviceSplit:
    """Devices that capture and devices that train, working at the same time; tokens per second of all
    together.
    """

    num_target: int
    num_drafter: int
    tokens_per_second: float
    bound_by: str  # "target" or "drafter": who the other waits for
    waiting_share: float  # of the devices' time that passes in waiting for the other kind


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One strategy on these lengths. `metrics` as `metrics.plan_metrics`, with repeated pairs."""

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
    strategies: tuple[Strategy, ...] = ("sorted", "sorted_fresh", "random", "bucketed", "packed"),
) -> list[Forecast]:
    """Plan two epochs of each strategy and predict its speed when every device captures and trains
    (`colocated`).

    The devices of a step wait for the slowest: predicted seconds are stretched by the measured balance of the
    deal.

    Returns:
        One forecast a strategy, fastest first.
    """
    out = []
    for strategy in strategies:
        chosen = replace(config, strategy=strategy)
        before, plan = (
            build_plan(lengths, chosen, seed=seed, epoch=epoch, draft_slots=draft_slots) for epoch in (0, 1)
        )
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
    """(strategy, reason): the fastest whose steps are mixed and whose microbatches are new each epoch.

    Mixed: the mean length of a step varies at most 3 times as much as i.i.d. New: under 2% of pairs meet
    again. `can_pack`: False for targets that cannot run packed (linear-attention hybrids).
    """
    allowed = [f for f in forecasts if can_pack or f.strategy != "packed"]
    if not allowed:
        raise UserError(
            "no strategy is left to recommend: forecasts hold only `packed`, which the target cannot run"
        )
    mixed = [
        f
        for f in allowed
        if f.metrics["mixing_step"] <= 3 and f.metrics.get("repeated_pair_share", 0) <= 0.02
    ]
    best = (mixed or allowed)[0]
    fastest = allowed[0]
    found = best.metrics
    numbers = (
        f"{best.tokens_per_second:,.0f} tokens/s, {found['padding_efficiency']:.1%} of slots hold tokens, "
        f"a step varies {found['mixing_step']:.2f} times as much as i.i.d., "
        f"{found.get('repeated_pair_share', 0):.2%} of pairs meet again"
    )
    if not mixed:
        return best.strategy, f"the fastest; none is well mixed on these lengths: {numbers}"
    if best is fastest:
        return best.strategy, f"the fastest, and well mixed: {numbers}"
    lost = 1 - best.tokens_per_second / fastest.tokens_per_second
    return best.strategy, f"well mixed at {lost:.1%} less speed than {fastest.strategy}: {numbers}"


def split_devices(num_devices: int, *, capture_rate: float, train_rate: float) -> list[DeviceSplit]:
    """All ways to share devices between target and drafter, best first.

    7 devices at 10 and 30 thousand tokens per second each: 5 capture 50, 2 train 60 -> 50, the target is
    waited for.

    Args:
        num_devices: at least 2.
        capture_rate, train_rate: tokens per second of one device that only captures, or only trains.
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


@dataclass(frozen=True, kw_only=True)
class SpeedCheck:
    """Predicted against measured speed, both relative to one strategy."""

    predicted: dict[str, float]
    measured: dict[str, float]
    residual: dict[str, float]  # predicted / measured - 1
    same_ranking: bool
    explanation: dict[str, float]  # term -> factor on its constant at which the worst residual vanishes
    explained_residual: dict[
        str, float
    ]  # term -> largest residual left among the other strategies at that factor


def check_speeds(
    work: Mapping[str, Work],
    measured_tokens_per_second: Mapping[str, float],
    *,
    relative_to: str,
    model: CostModel = REFERENCE,
) -> SpeedCheck:
    """Compare predicted capture speed with measured speed, and find which constant would explain what is
    left.

    Speeds are ratios to `relative_to`, so the device's absolute speed drops out. The target's forward is
    taken as the bottleneck (most devices of a split run it). For each of its terms, the factor on the term's
    constant is searched at which the strategy with the worst residual fits exactly; `explained_residual` says
    how well the others fit then.
    """

    units = {  # capture is linear in its constants: sums are enough
        name: np.array([counted.slots.sum(), counted.pairs.sum(), len(counted.slots)]) / counted.tokens.sum()
        for name, counted in work.items()
    }

    def ratios(changed: CostModel) -> dict[str, float]:
        constants = np.array([getattr(changed, term) for term in _CAPTURE_TERMS])
        seconds = {name: float(unit @ constants) for name, unit in units.items()}
        return {name: seconds[relative_to] / seconds[name] for name in work}

    base = measured_tokens_per_second[relative_to]
    measured = {name: measured_tokens_per_second[name] / base for name in work}
    predicted = ratios(model)
    residual = {name: predicted[name] / measured[name] - 1 for name in work}
    worst = max(residual, key=lambda name: abs(residual[name]))
    explanation: dict[str, float] = {}
    left: dict[str, float] = {}
    for term in _CAPTURE_TERMS:
        for factor in np.geomspace(1e-2, 1e4, 1201):
            changed = ratios(replace(model, **{term: getattr(model, term) * float(factor)}))
            now = {name: changed[name] / measured[name] - 1 for name in work}
            others = max((abs(now[name]) for name in work if name != worst), default=0.0)
            if abs(now[worst]) < 5e-3 and (term not in left or others < left[term]):
                explanation[term], left[term] = float(factor), others
    return SpeedCheck(
        predicted=predicted,
        measured=measured,
        residual=residual,
        same_ranking=sorted(work, key=predicted.__getitem__) == sorted(work, key=measured.__getitem__),
        explanation=explanation,
        explained_residual=left,
    )
