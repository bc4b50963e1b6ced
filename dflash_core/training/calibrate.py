"""Constants of the cost model, measured on this machine with a few microbatches of the real data.

Eight microbatches (four where the target cannot run packed) are captured and trained on three times each. No
plan is read and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_core.batching.cost import CostModel, Work
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.schedule import build_microbatch
from dflash_core.launch.layout import make_layout
from dflash_core.launch.process_groups import World, pick_devices
from dflash_core.microbatch import Microbatch
from dflash_core.objective.loss import LossSettings, microbatch_loss
from dflash_core.target.capture import TargetCapture
from dflash_core.training.run import (
    RunSpec,
    build_drafter,
    layer_ids,
    load_ends,
    load_target,
    load_target_config,
    pick_dtypes,
)

MAX_SLOTS = 16_384  # of a measured microbatch; larger budgets are extrapolated
ROUNDS = 3  # their mean counts, not their minimum: disturbances slow training as well

Choice = tuple[NDArray[np.int32], int]  # store rows, width (0: packed)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fitted cost model and the measurements behind it, for n microbatches."""

    model: CostModel
    capture_seconds: NDArray[np.float64]  # [n]
    train_seconds: NDArray[np.float64]  # [n]
    fitted_seconds: NDArray[np.float64]  # [n], capture and training by the model


def choose_microbatches(
    lengths: NDArray[np.int32], rows: NDArray[np.int32], *, token_budget: int, can_pack: bool
) -> list[Choice]:
    """Choose microbatches that separate the constants: full and small, few long and many short rows, padding.

    Lengths 4 1 1 2 and a budget of 8: packed [4], [1 1 2] (short ones, half the budget), a pack of random
    samples of up to 8 and of up to 2 tokens; padded [4 1] and random samples in rows of one width.
    """
    budget = min(token_budget, MAX_SLOTS)
    mixed = rows[np.random.default_rng(0).permutation(len(rows))]
    rising = rows[np.argsort(lengths[rows], kind="stable")]

    def within(candidates: NDArray[np.int32], slots: int) -> NDArray[np.int32]:
        count = int(np.searchsorted(np.cumsum(lengths[candidates]), slots, side="right"))
        return candidates[: max(1, count)]

    def padded(candidates: NDArray[np.int32], slots: int) -> Choice:
        widest = np.maximum.accumulate(lengths[candidates])
        count = int(np.searchsorted(widest * np.arange(1, len(candidates) + 1), slots, side="right"))
        chosen = candidates[: max(1, count)]
        return chosen, int(lengths[chosen].max())

    longest = rising[::-1]
    uneven = np.concatenate([longest[:1], rising[:-1]])
    choices = [padded(mixed, budget), padded(uneven, budget), padded(rising, budget // 2)]
    choices += [padded(longest, budget // 2)]
    if can_pack:
        choices += [(longest[:1], 0), (within(rising, budget // 2), 0)]
        choices += [(within(mixed, budget), 0), (within(mixed[::-1], budget // 4), 0)]
    return choices


def work_of(microbatches: list[Microbatch], block_size: int) -> Work:
    """Count the work of microbatches the same way as a plan does."""
    names = ("slots", "pairs", "tokens", "draft_slots", "draft_pairs")
    columns: dict[str, list[int]] = {name: [] for name in names}
    for microbatch in microbatches:
        lengths = np.diff(microbatch.cu_seqlens).astype(np.int64)
        widths = np.full_like(lengths, microbatch.width) if microbatch.width else lengths
        slots = np.bincount(microbatch.anchor_sample, minlength=len(lengths)) * block_size
        columns["slots"].append(int(widths.sum()))
        columns["pairs"].append(int((widths * widths).sum()))
        columns["tokens"].append(int(lengths.sum()))
        columns["draft_slots"].append(int(slots.sum()))
        columns["draft_pairs"].append(int((slots * lengths).sum()))
    return Work(**{name: np.array(values, dtype=np.int64) for name, values in columns.items()})


class Meter:
    """A stopwatch for capture and training of single microbatches of a run's data, forward and backward.

    Args:
        run: its target, shards and settings are used, not its plans.
    """

    def __init__(self, run: RunSpec) -> None:
        self.config = run.config
        alone = replace(run.config.training, topology="colocated", num_drafter_ranks=1, num_nodes=1)
        devices = pick_devices(alone, spread_target=run.config.target.device_map is not None)
        world = World(make_layout(alone), 0, devices, None, None, None)
        self.device = world.device
        self.store: TokenStore = run.open_store()
        dtypes = pick_dtypes(run, world, None)
        target_config = load_target_config(run)
        ids = layer_ids(run, target_config)
        target = load_target(run, world, ids, dtypes)
        self.can_pack = target.mode.can_pack
        self._capture = TargetCapture(target, self.config.objective)
        self._drafter = build_drafter(run, target_config, ids, self.device)
        self.block_size = self._drafter.shape.block_size
        ends = load_ends(run, target_config, target, self.device, dtypes["drafter"])
        mask, slots = self._drafter.shape.mask_token_id, self.config.training.max_draft_slots
        self._loss_settings = LossSettings(ends, self.config.objective, mask, slots, self.device)

    def build(self, rows: NDArray[np.int32], width: int) -> Microbatch:
        """Build the microbatch of these store rows (width 0: packed), with the anchors of epoch 0."""
        anchors, seed = self.config.objective.num_anchors, self.config.training.seed
        return build_microbatch(self.store, rows, width, num_anchors=anchors, seed=seed, epoch=0)

    def seconds(self, microbatch: Microbatch) -> tuple[float, float]:
        """Return the wall seconds of capture and of training, forward and backward."""
        started = self._now()
        features = self._capture(microbatch)
        captured = self._now()
        microbatch_loss(self._drafter, microbatch, features, self._loss_settings, backward=True)
        return captured - started, self._now() - captured

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def fit_cost_model(
    meter: Meter,
    between: Sequence[Microbatch] = (),
    on_progress: Callable[[int, int], None] | None = None,
    *,
    between_rounds: int = ROUNDS,
) -> tuple[Calibration, NDArray[np.float64]]:
    """Time captures and training of a few microbatches and fit the constants of the cost model.

    Args:
        meter: of the run.
        between: further microbatches to time, spread among the others and not used for the fit.
        on_progress: called with (measurements done, all).
        between_rounds: number of measurements of each of `between`.

    Returns:
        The calibration, and float64[len(between), 2]: capture and training seconds of `between`.
    """
    choices = choose_microbatches(
        meter.store.lengths,
        meter.store.train_indices,
        token_budget=meter.config.batching.token_budget,
        can_pack=meter.can_pack,
    )
    microbatches = [meter.build(*choice) for choice in choices]
    meter.seconds(microbatches[-1])  # compilation, first touches of memory
    seconds, between_seconds = np.zeros((len(microbatches), 2)), np.zeros((len(between), 2))
    fitted = [(seconds, i, m) for _ in range(ROUNDS) for i, m in enumerate(microbatches)]
    spread = [(between_seconds, i, m) for _ in range(between_rounds) for i, m in enumerate(between)]
    # Each list is spread evenly over the whole time, so both see the same disturbances.
    turns = [((n + 0.5) / len(part), turn) for part in (fitted, spread) for n, turn in enumerate(part)]
    turns.sort(key=lambda turn: turn[0])
    for done, (_, (into, i, microbatch)) in enumerate(turns, 1):
        into[i] += meter.seconds(microbatch)
        if on_progress is not None:
            on_progress(done, len(turns))
    seconds /= ROUNDS
    between_seconds /= between_rounds
    work = work_of(microbatches, meter.block_size)
    model = CostModel.fit(work, capture_seconds=seconds[:, 0], train_seconds=seconds[:, 1])
    calibration = Calibration(
        model=model,
        capture_seconds=seconds[:, 0],
        train_seconds=seconds[:, 1],
        fitted_seconds=model.seconds(work),
    )
    return calibration, between_seconds
