"""Seconds of work by kind on a CPU."""

from __future__ import annotations

import time

import torch

from dflash_core.dataflow.device_clock import DeviceClock


def test_seconds_add_up_until_they_are_taken() -> None:
    clock = DeviceClock(torch.device("cpu"))
    for _ in range(2):
        with clock.time("capture"):
            time.sleep(0.01)
    clock.add("reports", 1)
    clock.add("reports", 2)
    taken = clock.take()
    assert 0.02 <= taken["capture"] < 1
    assert taken["reports"] == 3
    assert clock.take() == {}
