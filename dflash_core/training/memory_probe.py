"""The two largest microbatches, run once before the first step, so that a lack of memory shows at once.

Peak memory of a drafter follows `max_draft_slots` and the longest context, that of a target its slots and
attention, so the microbatch with most draft slots and the one with most attention pairs bound all others.
They run as they will in training: weights, gradients and optimizer moments are allocated, captures overlap
training where ranks are colocated, and receive buffers are held. On a CPU the probe is left out: memory there
is not a fixed budget to be checked, and these are the slowest microbatches of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dflash_core.dataflow.assignment import Assignment
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.schedule import Schedule
from dflash_core.dataflow.transfer import capture_here
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import RunFailed
from dflash_core.launch.process_groups import World
from dflash_core.launch.rank_status import RankRecord
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.objective.loss import LossSettings, microbatch_loss
from dflash_core.target.capture import Capture
from dflash_core.training.optim import Gradients, ShardedGradients
from dflash_core.training.run import RunSpec

Train = Callable[[Microbatch, Features, int], object]  # forward and backward, with max_draft_slots


def largest_microbatches(schedule: Schedule) -> list[Assignment]:
    """Return the first epoch's microbatch with most draft slots, and the one with most attention pairs."""
    work = schedule.plan(0).work
    chosen = dict.fromkeys((int(work.draft_slots.argmax()), int(work.pairs.argmax())))
    return [Assignment(0, i, 0, microbatch, 0, 0) for i, microbatch in enumerate(chosen)]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The two settings that determine the peak memory."""

    max_draft_slots: int
    token_budget: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One rank's work on the largest microbatches: capture, train, or both."""

    microbatches: list[Microbatch]
    capture: Capture | None
    train: Train | None
    spec: FeatureSpec
    record: RankRecord
    device: torch.device
    max_inflight: int

    def run(self, limits: Limits) -> None:
        """Run all microbatches once, cut to `token_budget` slots.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        microbatches = [leading(m, limits.token_budget) for m in self.microbatches]
        for microbatch, features in self._deliveries(microbatches):
            if self.train is not None:
                self.train(microbatch, features, limits.max_draft_slots)

    def check(self, run: RunSpec) -> None:
        """Run the microbatches under the settings of `run`.

        Raises:
            RunFailed: they do not fit, with settings that do.
        """
        limits = limits_of(run)
        if not self._fits(limits):
            raise RunFailed(out_of_memory_advice(run, self.what_fits(limits, run.config.drafter.block_size)))

    def peak(self) -> str:
        """Return a line with the peak since the process started, or "" on a CPU; free all reserved memory."""
        if self.device.type != "cuda":
            return ""
        torch.cuda.synchronize(self.device)
        peak, total = torch.cuda.max_memory_allocated(self.device), torch.cuda.mem_get_info(self.device)[1]
        torch.cuda.empty_cache()
        return f"probe of the largest microbatches: peak {peak / 1e9:.1f} of {total / 1e9:.1f} GB"

    def _deliveries(self, microbatches: list[Microbatch]) -> Iterator[tuple[Microbatch, Features]]:
        if self.capture is not None and self.train is not None:
            rounds = [*microbatches, microbatches[0]]  # each is trained on while another is captured
            feed = [(Assignment(0, i, 0, 0, 0, 0), m) for i, m in enumerate(rounds)]
            for _, microbatch, features in capture_here(
                feed, self.capture, self.record, DeviceClock(self.device), self.device
            ):
                yield microbatch, features
            return
        largest = max(m.num_tokens for m in microbatches)
        held = [self.spec.empty(largest, self.device) for _ in range(self.max_inflight)]
        for microbatch in microbatches:
            if self.capture is not None:
                yield microbatch, self.capture(microbatch)
            else:
                yield microbatch, self.spec.empty(microbatch.num_tokens, self.device).zeros()
        del held

    def what_fits(self, limits: Limits, block_size: int) -> Limits | None:
        """Try smaller limits and return the first that fits, or None.

        Half the draft slots, a quarter, ..., one block; then the same with half the token budget, and so on
        down to one sample per microbatch.
        """
        for token_budget in _halvings(limits.token_budget, 1):
            if replace(self, train=None)._fits(replace(limits, token_budget=token_budget)):
                for max_draft_slots in _halvings(limits.max_draft_slots, block_size):
                    smaller = Limits(max_draft_slots=max_draft_slots, token_budget=token_budget)
                    if smaller != limits and self._fits(smaller):
                        return smaller
            if all(leading(m, token_budget).num_samples == 1 for m in self.microbatches):
                break
        return None

    def _fits(self, limits: Limits) -> bool:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            self.run(limits)
        except torch.OutOfMemoryError:
            return False
        return True


def probe_memory(
    run: RunSpec,
    schedule: Schedule,
    make: Callable[[Assignment], Microbatch],
    *,
    capture: Capture | None,
    train: Train | None = None,
    spec: FeatureSpec,
    record: RankRecord,
    device: torch.device,
) -> str:
    """Run this rank's part of the largest microbatches; return a line with the peak, or "" on a CPU.

    Raises:
        RunFailed: out of memory, with settings that fit.
    """
    if not has_fixed_memory(device):
        return ""
    probe = Probe(
        microbatches=[make(a) for a in largest_microbatches(schedule)],
        capture=capture,
        train=train,
        spec=spec,
        record=record,
        device=device,
        max_inflight=run.config.training.max_inflight_microbatches,
    )
    probe.check(run)
    return probe.peak()


def probe_training(
    run: RunSpec,
    schedule: Schedule,
    make: Callable[[Assignment], Microbatch],
    *,
    capture: Capture | None,
    drafter: DFlashDrafter,
    gradients: Gradients | ShardedGradients,
    loss_settings: LossSettings,
    spec: FeatureSpec,
    record: RankRecord,
    world: World,
) -> str:
    """Probe a rank that trains, colocated with a capture or not; leave no gradient behind.

    Collective: every rank that trains must call it.

    Raises:
        RunFailed: out of memory, with settings that fit.
    """

    def train(microbatch: Microbatch, features: Features, max_draft_slots: int) -> None:
        limited = replace(loss_settings, max_draft_slots=max_draft_slots)
        microbatch_loss(drafter, microbatch, features, limited, backward=True)

    gradients.gather_weights()
    line = probe_memory(
        run,
        schedule,
        make,
        capture=capture,
        train=train,
        spec=spec,
        record=record,
        device=world.device,
    )
    gradients.reduce(world.gradients)  # sharded weights keep an unreduced gradient whole
    gradients.zero()
    gradients.scatter_weights()
    return line


def has_fixed_memory(device: torch.device) -> bool:
    """Return True if exceeding memory raises an error that can be caught, instead of swapping or a kill."""
    return device.type == "cuda"


def limits_of(run: RunSpec) -> Limits:
    """Return the limits that the run's settings give."""
    config = run.config
    return Limits(max_draft_slots=config.training.max_draft_slots, token_budget=config.batching.token_budget)


def out_of_memory_advice(run: RunSpec, fits: Limits | None = None) -> str:
    """Return a message with the settings to lower and their values, and with values that fit if known."""
    now = limits_of(run)
    if fits is not None and fits.token_budget == now.token_budget:
        return (
            f"out of memory: training.max_draft_slots {fits.max_draft_slots} would fit "
            f"(now {now.max_draft_slots}); the result does not change"
        )
    if fits is not None:
        return (
            f"out of memory: batching.token_budget {fits.token_budget} would fit (now {now.token_budget}), "
            f"with training.max_draft_slots {fits.max_draft_slots} (now {now.max_draft_slots})"
        )
    advice = (
        f"out of memory: lower training.max_draft_slots (now {now.max_draft_slots}; peak memory of the "
        f"drafter follows it, the result does not change) or batching.token_budget (now {now.token_budget}; "
        "slots of the target's forward), or set training.parallel to fsdp2 (shards optimizer and weights)"
    )
    is_split = run.config.training.topology == "split"
    if is_split:
        return advice
    return f"{advice}, or training.topology to split (target and drafter on separate devices)"


def _halvings(value: int, least: int) -> Iterator[int]:
    """Yield `value`, then each half of it that is not below `least`: 20, 10, 5, 2 for 20 and 2."""
    while value >= least:
        yield value
        value //= 2


def leading(microbatch: Microbatch, max_slots: int) -> Microbatch:
    """Return the first samples that fit into `max_slots` slots of the target's forward; at least one."""
    ends = microbatch.cu_seqlens[1:]
    count = max_slots // microbatch.width if microbatch.width else int((ends <= max_slots).sum())
    count = min(max(1, count), microbatch.num_samples)
    end = int(ends[count - 1])
    inside = microbatch.anchors < end
    return replace(
        microbatch,
        sample_rows=microbatch.sample_rows[:count],
        token_ids=microbatch.token_ids[:end],
        loss_mask=microbatch.loss_mask[:end],
        cu_seqlens=microbatch.cu_seqlens[: count + 1],
        anchors=microbatch.anchors[inside],
        anchor_sample=microbatch.anchor_sample[inside],
    )
