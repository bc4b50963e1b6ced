"""One optimizer step, computed in different ways: the same loss and gradient within 1e-5, in float32.

From tokens to the divided gradient, as in training: capture, anchors, drafter, loss, sum. Catches means of
means, visible padding, anchors that depend on the other samples, chunks that are weighted, and memory that
grows with the anchors. (Several ranks: `test_loop.py`.)
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.support.tiny_run import write_shard
from dflash_core.config import ObjectiveConfig
from dflash_core.data.store import TokenStore
from dflash_core.dataflow.schedule import build_microbatch
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.objective.loss import LossSettings, LossSums, TargetEnds, microbatch_loss
from dflash_core.target.capture import TargetCapture
from dflash_core.target.target import Target
from dflash_core.training.optim import Gradients
from tests.support.drafter_cases import (
    SHAPE,
    Case,
    assert_close,
    assert_sums_close,
    make_case,
    make_drafter,
    run,
)

# row 9 has no anchor
ROWS = np.array([3, 9, 4, 6], dtype=np.int32)
OBJECTIVES = {
    "decay": ObjectiveConfig(num_anchors=6),
    "dpace, target's labels": ObjectiveConfig(num_anchors=6, weighting="dpace", labels="target"),
    "kl": ObjectiveConfig(num_anchors=6, loss="kl", labels="target"),
}


class Step:
    """A target, a drafter for it, and a store of samples."""

    def __init__(self, tiny_target_dir: Path, shard: Path, objective: ObjectiveConfig) -> None:
        self.target = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
        self.store = TokenStore.open([shard], validation_share=0.1, min_validation_samples=4)
        self.capture = TargetCapture(self.target, objective)
        width, vocabulary = self.target.embed_weight.shape[1], self.target.embed_weight.shape[0]
        shape = {**vars(SHAPE), "hidden_size": width, "vocab_size": vocabulary, "target_layer_ids": (0, 2)}
        self.drafter: DFlashDrafter = make_drafter(type(SHAPE)(**shape))
        self.objective = objective

    def __call__(self, cuts: list[int], *, padded: bool, max_draft_slots: int) -> tuple[LossSums, dict]:
        """Return sums and divided gradient of the samples `ROWS`, cut into microbatches at `cuts`."""
        ends = TargetEnds(self.target.embed_weight, self.target.head_weight)
        loss_settings = LossSettings(ends, self.objective, 3, max_draft_slots, torch.device("cpu"))
        gradients = Gradients(self.drafter.parameters())
        sums = LossSums.zeros(self.drafter.shape.block_size)
        for first, end in pairwise(cuts):
            rows = ROWS[first:end]
            width = int(self.store.lengths[rows].max()) + 3 if padded else 0
            microbatch = build_microbatch(self.store, rows, width, num_anchors=6, seed=0, epoch=0)
            sums = sums + microbatch_loss(
                self.drafter, microbatch, self.capture(microbatch), loss_settings, backward=True
            )
        gradients.normalise(float(sums.weight_sum), clip_norm=1e9)
        return sums, {name: p.grad.clone() for name, p in self.drafter.named_parameters()}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shard(tmp_path_factory.mktemp("samples") / "shard", num_samples=12)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_same_step_in_other_microbatches_padding_and_chunks(
    tiny_target_dir: Path, shard: Path, objective: ObjectiveConfig
) -> None:
    step = Step(tiny_target_dir, shard, objective)
    expected, expected_gradient = step([0, 4], padded=False, max_draft_slots=10_000)
    assert int(expected.num_blocks) == 18
    # 4 samples at once, 2 and 2, one by one
    for cuts in ([0, 4], [0, 2, 4], [0, 1, 2, 3, 4]):
        for padded in (False, True):
            for max_draft_slots in (10_000, 20):
                sums, gradient = step(cuts, padded=padded, max_draft_slots=max_draft_slots)
                assert_sums_close(sums, expected)
                assert_close(gradient, expected_gradient)


def test_tokens_in_padding_change_nothing(tiny_target_dir: Path) -> None:
    """With other tokens in the padding slots of the target's forward, every real state is bit-equal."""
    target = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
    tokens, bounds = np.arange(20, 34), np.array([0, 5, 14], dtype=np.int32)
    before = target.capture(tokens, bounds, 12, want_last_hidden=True)

    def fill(module: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        ids = kwargs["input_ids"].clone()
        assert not ids[0, 5:].any()
        assert not ids[1, 9:].any()
        ids[0, 5:], ids[1, 9:] = 77, 88
        return args, {**kwargs, "input_ids": ids}

    handle = target.decoder.register_forward_pre_hook(fill, with_kwargs=True)
    after = target.capture(tokens, bounds, 12, want_last_hidden=True)
    handle.remove()
    assert torch.equal(after.hidden, before.hidden)
    assert torch.equal(after.last_hidden, before.last_hidden)


def many_blocks(case: Case, times: int) -> Case:
    """Return the first sample with each anchor repeated `times` times (equal anchors are allowed)."""
    one = case.samples(0, 1)
    one.anchors = one.anchors.repeat_interleave(times)
    one.anchor_sample = torch.zeros_like(one.anchors)
    return one


def peak_bytes(drafter: DFlashDrafter, case: Case, max_draft_slots: int, trace: Path) -> int:
    """Return the most memory that tensors of one microbatch held at once, from the allocator's events."""
    drafter.zero_grad(set_to_none=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as p:
        run(drafter, case, ObjectiveConfig(), max_draft_slots=max_draft_slots)
    p.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    sizes = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"])]
    return int(np.cumsum(sizes).max())


def test_peak_memory_follows_the_chunk_and_not_the_anchors(tmp_path: Path) -> None:
    """4 times the anchors: a few more index tensors in chunks of 64 slots, over 3 times the memory whole."""
    drafter, case, trace = make_drafter(), make_case(), tmp_path / "trace.json"
    run(drafter, case, ObjectiveConfig())
    few, many = many_blocks(case, 16), many_blocks(case, 64)  # 192 and 768 slots
    chunked, whole = (
        [peak_bytes(drafter, blocks, max_draft_slots, trace) for blocks in (few, many)]
        for max_draft_slots in (64, 10_000)
    )
    assert chunked[1] < 1.1 * chunked[0]
    assert whole[1] > 3 * whole[0]
    assert whole[0] > 2 * chunked[0]
