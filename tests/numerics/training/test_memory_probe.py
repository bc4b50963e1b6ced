"""The memory probe: settings that fit, found on a simulated device of limited memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dflash_core.config import RunConfig, from_dict
from dflash_core.errors import RunFailed
from dflash_core.microbatch import Features, FeatureSpec, Microbatch
from dflash_core.training.memory_probe import Limits, Probe, leading, out_of_memory_advice

SPEC = FeatureSpec(
    hidden_width=2, hidden_dtype=torch.float32, has_labels=False, last_width=0, last_dtype=torch.float32
)


def microbatch(*lengths: int, width: int = 0) -> Microbatch:
    """Samples of these lengths, an anchor at the first token of each."""
    ends = np.cumsum(lengths).astype(np.int32)
    total = int(ends[-1])
    return Microbatch(
        sample_rows=np.arange(len(lengths), dtype=np.int32),
        token_ids=np.arange(total),
        loss_mask=np.ones(total, np.uint8),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        width=width,
        anchors=(ends - np.array(lengths)).astype(np.int32),
        anchor_sample=np.arange(len(lengths), dtype=np.int32),
    )


class Device:
    """A device with room for `slots` of a target's forward and `draft_slots` in a drafter's chunk."""

    def __init__(self, slots: int, draft_slots: int) -> None:
        self.slots, self.draft_slots = slots, draft_slots
        self.trained: list[tuple[int, int]] = []  # tokens, draft slots

    def capture(self, part: Microbatch) -> Features:
        if part.num_slots > self.slots:
            raise torch.OutOfMemoryError
        return Features(torch.zeros(part.num_tokens, 2), None, None)

    def train(self, part: Microbatch, features: Features, max_draft_slots: int) -> None:
        assert len(features.hidden) == part.num_tokens
        if max_draft_slots > self.draft_slots:
            raise torch.OutOfMemoryError
        self.trained.append((part.num_tokens, max_draft_slots))


def probe_of(device: Device, *, captures: bool = True, trains: bool = True) -> Probe:
    return Probe(
        microbatches=[microbatch(30, 30, 30), microbatch(90)],
        capture=device.capture if captures else None,
        train=device.train if trains else None,
        spec=SPEC,
        record=cast(Any, SimpleNamespace(phase=lambda *_, **__: None)),
        device=torch.device("cpu"),
        max_inflight=2,
    )


RUN = cast(
    Any,
    SimpleNamespace(
        config=from_dict(
            RunConfig,
            {
                "training": {"max_draft_slots": 64},
                "batching": {"token_budget": 96},
                "drafter": {"block_size": 4},
            },
        )
    ),
)


def test_one_microbatch_is_trained_while_another_is_captured() -> None:
    device = Device(96, 64)
    probe_of(device).check(RUN)
    assert device.trained == [(90, 64)] * 3  # the first again: it is captured while the last is trained
    alone = Device(0, 64)
    probe_of(alone, captures=False).check(RUN)  # a drafter rank of `split`
    assert len(alone.trained) == 2


def test_fewer_draft_slots_are_named_first() -> None:
    with pytest.raises(
        RunFailed, match="training.max_draft_slots 16 would fit .now 64.; the result does not change"
    ):
        probe_of(Device(96, 20)).check(RUN)
    with pytest.raises(RunFailed, match="training.max_draft_slots 16 would fit"):
        probe_of(Device(0, 20), captures=False).check(RUN)


def test_a_smaller_token_budget_where_the_target_does_not_fit() -> None:
    probe = replace(probe_of(Device(40, 16)), microbatches=[microbatch(30, 30, 30)])
    fitting = probe.what_fits(Limits(max_draft_slots=64, token_budget=96), 4)
    assert fitting == Limits(max_draft_slots=16, token_budget=48)  # one sample of 30
    assert "batching.token_budget 48 would fit (now 96), with training.max_draft_slots 16 (now 64)" in (
        out_of_memory_advice(RUN, fitting)
    )


def test_a_sample_that_does_not_fit_alone() -> None:
    with pytest.raises(RunFailed, match="lower training.max_draft_slots .now 64.*topology to split"):
        probe_of(Device(40, 64)).check(RUN)  # one of 90 tokens: no budget helps
    with pytest.raises(RunFailed, match="lower training.max_draft_slots"):
        probe_of(Device(96, 3)).check(RUN)  # below a block


def test_leading_samples_keep_their_anchors() -> None:
    part = leading(microbatch(3, 2, 4), 6)
    assert part.cu_seqlens.tolist() == [0, 3, 5]
    assert part.num_tokens == 5
    assert part.anchors.tolist() == [0, 3]
    assert part.anchor_sample.tolist() == [0, 1]
    assert leading(microbatch(3, 2, 4, width=4), 8).num_samples == 2  # padded rows of 4
    assert leading(microbatch(9, 2), 4).num_samples == 1  # never none
    whole = microbatch(3, 2, 4)
    assert leading(whole, 9).num_tokens == 9
