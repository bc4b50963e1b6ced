"""The two largest microbatches, run once before the first step: out of memory shows now, with what to change.

Peak memory of a drafter follows `max_draft_slots` and the longest context, that of a target its slots and
attention, so the microbatch with most draft slots and the one with most attention pairs bound all others. On
a CPU the probe is left out: memory there is not a fixed budget to be checked, and these are the slowest
microbatches of the run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_core.training.capture import Capture, Features, FeatureSpec
from dflash_core.training.feed import Assignment, Microbatch, Schedule


def largest_microbatches(schedule: Schedule) -> list[Assignment]:
    """The microbatch of the first epoch with most draft slots, and the one with most attention pairs."""
    work = schedule.plan(0).work
    chosen = dict.fromkeys((int(work.draft_slots.argmax()), int(work.pairs.argmax())))
    return [Assignment(0, i, 0, microbatch, 0, 0) for i, microbatch in enumerate(chosen)]


def probe(
    schedule: Schedule,
    make: Callable[[Assignment], Microbatch],
    capture: Capture | None,
    train: Callable[[Microbatch, Features], object] | None,
    spec: FeatureSpec,
    device: torch.device,
) -> str:
    """Run them as this rank would: capture, forward and backward, or the part that is this rank's.

    Raises:
        torch.OutOfMemoryError: they do not fit.

    Returns:
        A line with the peak, or "" on a CPU.
    """
    if device.type != "cuda":
        return ""
    torch.cuda.reset_peak_memory_stats(device)
    for assignment in largest_microbatches(schedule):
        microbatch = make(assignment)
        features = (
            capture(microbatch) if capture is not None else spec.empty(microbatch.num_tokens, device).zeros()
        )
        if train is not None:
            train(microbatch, features)
    torch.cuda.synchronize(device)
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
    torch.cuda.empty_cache()
    return f"probe of the largest microbatches: peak {peak / 1e9:.1f} of {total / 1e9:.1f} GB"
