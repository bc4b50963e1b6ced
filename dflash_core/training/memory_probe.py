"""The two largest microbatches, run once before the first step: out of memory shows now, with what would fit.

Peak memory of a drafter follows `max_draft_slots` and the longest context, that of a target its slots and
attention, so the microbatch with most draft slots and the one with most attention pairs bound all others. They run
as they will in training: weights, gradients and optimizer moments are there, captures overlap training where ranks
are colocated, and buffers of what travels are held. On a CPU the probe is left out: memory there is not a fixed
budget to be checked, and these are the slowest microbatches of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dflash_core.dataflow.assignment import Assignment
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.dataflow.schedule import Schedule
from dflash_core.dataflow.transfer import capture_here
from dflash_core.errors import RunFailed
from dflash_core.launch.rank_status import RankRecord
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.target.capture import Capture
from dflash_core.training.run import Run

Train = Callable[[Microbatch, Features, int], object]  # forward and backward, with max_draft_slots


def largest_microbatches(schedule: Schedule) -> list[Assignment]:
    """The microbatch of the first epoch with most draft slots, and the one with most attention pairs."""
    work = schedule.plan(0).work
    chosen = dict.fromkeys((int(work.draft_slots.argmax()), int(work.pairs.argmax())))
    return [Assignment(0, i, 0, microbatch, 0, 0) for i, microbatch in enumerate(chosen)]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The two settings that memory follows."""

    max_draft_slots: int
    token_budget: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one rank would do with the largest microbatches: capture, train, or both."""

    microbatches: list[Microbatch]
    capture: Capture | None
    train: Train | None
    spec: FeatureSpec
    record: RankRecord
    device: torch.device
    max_inflight: int

    def run(self, limits: Limits) -> None:
        """Once through, microbatches cut to `token_budget` slots.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        for microbatch, features in self._deliveries(
            [leading(m, limits.token_budget) for m in self.microbatches]
        ):
            if self.train is not None:
                self.train(microbatch, features, limits.max_draft_slots)

    def check(self, run: Run) -> None:
        """Raises RunFailed where they do not fit, with settings that do."""
        limits = limits_of(run)
        if not self._fits(limits):
            raise RunFailed(out_of_memory_advice(run, self.what_fits(limits, run.config.drafter.block_size)))

    def peak(self) -> str:
        """A line with the peak since the process started, or "" on a CPU; leaves no memory reserved."""
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
        """The first that runs of: half the draft slots, a quarter, ... down to a block; then the same with half the
        token budget, and so on down to one sample a microbatch. None: not even that.
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


def probe(
    run: Run,
    schedule: Schedule,
    make: Callable[[Assignment], Microbatch],
    *,
    capture: Capture | None,
    train: Train | None,
    spec: FeatureSpec,
    record: RankRecord,
    device: torch.device,
) -> str:
    """Run this rank's part of the largest microbatches; a line with the peak, or "" on a CPU.

    Raises:
        RunFailed: out of memory, with settings that fit.
    """
    if not has_fixed_memory(device):
        return ""
    part = Probe(
        microbatches=[make(a) for a in largest_microbatches(schedule)],
        capture=capture,
        train=train,
        spec=spec,
        record=record,
        device=device,
        max_inflight=run.config.training.max_inflight_microbatches,
    )
    part.check(run)
    return part.peak()


def has_fixed_memory(device: torch.device) -> bool:
    """Whether too much is an error that can be caught, not a machine that swaps or kills."""
    return device.type == "cuda"


def limits_of(run: Run) -> Limits:
    """As the run is set."""
    return Limits(
        max_draft_slots=run.config.training.max_draft_slots, token_budget=run.config.batching.token_budget
    )


def out_of_memory_advice(run: Run, fits: Limits | None = None) -> str:
    """What to change, with the values that were too much, and those that fit where a probe found some."""
    now, split = limits_of(run), run.config.training.topology == "split"
    if fits is not None and fits.token_budget == now.token_budget:
        said = f"training.max_draft_slots {fits.max_draft_slots} would fit (now {now.max_draft_slots})"
        return f"out of memory: {said}; the result does not change"
    if fits is not None:
        return (
            f"out of memory: batching.token_budget {fits.token_budget} would fit (now {now.token_budget}), with "
            f"training.max_draft_slots {fits.max_draft_slots} (now {now.max_draft_slots})"
        )
    return (
        f"out of memory: lower training.max_draft_slots (now {now.max_draft_slots}; peak memory of the drafter "
        f"follows it, the result does not change), or batching.token_budget (now {now.token_budget}; slots of the "
        "target's forward), or set training.parallel to fsdp2 (optimizer and master weights sharded)"
        + ("" if split else ", or training.topology to split (target and drafter on devices of their own)")
    )


def _halvings(value: int, least: int) -> Iterator[int]:
    """20, 10, 5, 2 for 20 and 2."""
    while value >= least:
        yield value
        value //= 2


def leading(microbatch: Microbatch, max_slots: int) -> Microbatch:
    """Its first samples, as many as keep the target's forward within so many slots; at least one."""
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
