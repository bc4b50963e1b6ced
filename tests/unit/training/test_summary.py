"""Advice on a better split of the ranks."""

from __future__ import annotations

from dflash_core.launch.layout import make_layout
from dflash_core.training.summary import split_advice
from tests.support.layouts import split


def test_advice_names_the_slower_side_and_the_better_split() -> None:
    advice = split_advice(300.0, 100.0, make_layout(split(2, 2)))
    assert "targets are the bottleneck" in advice
    assert "busy 33% of the time" in advice  # 50 of 150 s
    assert "3+1 (targets+drafters) would give about 1.50x" in advice
    assert "this split is the best" in split_advice(300.0, 100.0, make_layout(split(3, 1)))
    assert "drafters are the bottleneck" in split_advice(10.0, 100.0, make_layout(split(1, 1)))
