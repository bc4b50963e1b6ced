"""Speeds and speed-ups of batches that a person can add up."""

from __future__ import annotations

import pytest

from dflash_core.decoding.speed import Timing, speed_report


def timing(plain_seconds: float, speculative_seconds: float, tokens: int = 10) -> Timing:
    return Timing(
        prompts=(0,),
        plain_tokens=tokens,
        plain_seconds=plain_seconds,
        speculative_tokens=tokens,
        speculative_seconds=speculative_seconds,
    )


def test_a_speed_up_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    report = speed_report([timing(1.0, 1.0), timing(9.0, 3.0, tokens=90)])
    assert report["plain_tokens_per_second"] == 10.0
    assert report["speculative_tokens_per_second"] == 25.0
    assert report["speedup"] == 2.5
    assert report["plain_seconds"] == 10.0
    assert report["speculative_tokens"] == 100
    low, high = report["speedup_interval"]
    # Draws of the same batch twice give 1 and 3.
    assert (low, high) == pytest.approx((1.0, 3.0))


def test_one_batch_has_no_interval() -> None:
    assert speed_report([timing(2.0, 1.0)])["speedup_interval"] is None
