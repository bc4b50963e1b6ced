"""Who worked and who waited in a step, from seconds that can be added up by hand."""

from __future__ import annotations

import time

import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.dataflow.device_clock import DeviceClock
from dflash_core.launch.layout import make_layout
from dflash_core.training.loop import SPENT, role_metrics


def test_seconds_of_a_split_step() -> None:
    """3 targets captured for 4 s each, 1 drafter trained for 2 s, waited for 3 s; 5 s a step, 1,200 tokens."""
    layout = make_layout(TrainingConfig(topology="split", num_target_ranks=3))
    spent = dict.fromkeys(SPENT, 0.0) | {
        "capture": 12.0,
        "train": 2.0,
        "wait": 3.0,
        "target_wait": 1.5,
        "inflight": 9.0,
        "reports": 6.0,
    }
    found = role_metrics(spent, layout, 5.0, 1200)
    assert found["perf/capture_seconds"] == 4.0 and found["perf/targets_busy"] == 0.8
    assert found["perf/drafter_seconds"] == 2.0 and found["perf/drafters_busy"] == 0.4
    assert found["perf/wait_seconds"] == 3.0 and found["perf/target_wait_seconds"] == 0.5
    assert found["perf/capture_tokens_per_second"] == 300 and found["perf/train_tokens_per_second"] == 600
    assert found["perf/inflight_microbatches"] == 1.5


def test_colocated_ranks_have_no_one_to_wait_for_and_may_overlap() -> None:
    layout = make_layout(TrainingConfig(num_drafter_ranks=2))
    spent = dict.fromkeys(SPENT, 0.0) | {"capture": 8.0, "train": 4.0}
    found = role_metrics(spent, layout, 5.0, 100)
    assert found["perf/targets_busy"] + found["perf/drafters_busy"] == pytest.approx(1.2)  # a fifth overlaps
    assert "perf/target_wait_seconds" not in found and "perf/inflight_microbatches" not in found
    cached = role_metrics(spent | {"capture": 0.0}, layout, 5.0, 100)
    assert cached["perf/capture_seconds"] == 0 and "perf/capture_tokens_per_second" not in cached


def test_a_clock_adds_up_until_it_is_read() -> None:
    clock = DeviceClock(torch.device("cpu"))
    for _ in range(2):
        with clock.time("capture"):
            time.sleep(0.01)
    clock.add("reports", 1)
    clock.add("reports", 2)
    taken = clock.take()
    assert 0.02 <= taken["capture"] < 1 and taken["reports"] == 3
    assert clock.take() == {}
