"""Paired differences of two drafters on prompts that a person can count."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.decoding.paired import compare_records


def record(number: int, emitted: list[int], prompt_set: str = "a", **more: Any) -> dict[str, Any]:
    return {"prompt": number, "prompt_set": prompt_set, "prompt_tokens": 5, "emitted": emitted, **more}


FIRST = [record(0, [1, 1, 1, 1]), record(1, [2, 2]), record(2, [4], "b")]
SECOND = [record(0, [2, 2]), record(1, [4]), record(2, [2, 2], "b")]


def test_a_difference_is_one_of_ratios_of_sums() -> None:
    compared = compare_records(FIRST, SECOND)
    assert list(compared) == ["a", "b", "all"]
    of_a = compared["a"]["acceptance_length"]
    assert of_a["first_sums"] == [8, 6]
    assert of_a["second_sums"] == [8, 3]
    assert of_a["difference"] == pytest.approx(8 / 3 - 8 / 6)
    # Prompt 0 alone: 2 - 1; prompt 1 alone: 4 - 2. Both drafters draw the same prompts.
    assert of_a["interval"] == pytest.approx([1.0, 2.0])
    assert compared["b"]["acceptance_length"]["difference"] == -2.0
    assert compared["b"]["acceptance_length"]["interval"] is None
    assert compared["all"]["prompts"] == 3
    assert compared["all"]["speedup"] is None


def test_speed_ups_are_paired_over_the_prompts_decoded_one_at_a_time() -> None:
    first = [
        record(0, [1], one_at_a_time=[8, 4.0, 8, 4.0]),
        record(1, [1], one_at_a_time=[8, 4.0, 8, 2.0]),
        record(2, [1]),
    ]
    second = [
        record(0, [1], one_at_a_time=[8, 4.0, 8, 2.0]),
        record(1, [1], one_at_a_time=[8, 4.0, 8, 1.0]),
        record(2, [1]),
    ]
    speed = compare_records(first, second)["all"]["speedup"]
    assert speed["prompts"] == 2
    assert speed["first"] == pytest.approx(16 / 6 / 2)
    assert speed["second"] == pytest.approx(16 / 3 / 2)
    assert speed["first_sums"] == [16, 8.0, 16, 6.0]
    assert speed["interval"] == pytest.approx([1.0, 2.0])


def test_prompts_without_a_step_are_left_out() -> None:
    compared = compare_records([record(0, []), record(1, [2])], [record(0, []), record(1, [3])])
    assert compared["all"]["acceptance_length"]["prompts"] == 1
    assert compare_records([record(0, [])], [record(0, [])])["all"]["acceptance_length"] is None


def test_other_prompts_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="prompt 0 differs"):
        compare_records([record(0, [1])], [record(0, [1], "b")])
