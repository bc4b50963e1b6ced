"""Counting by hand: emitted tokens / verification steps, the bonus included, nothing after an end token."""

from __future__ import annotations

import pytest

from dflash_core.decoding.acceptance import (
    Generation,
    acceptance_by_position,
    acceptance_interval,
    acceptance_length,
    acceptance_report,
    bfloat16_steps,
    find_divergences,
)

END = (7, 9)


def step(generation: Generation, drafts: list[int], bonus: int, limit: int = 100) -> Generation:
    generation.take(drafts, bonus, num_drafted=3, limit=limit, eos_ids=END)
    return generation


def with_steps(*emitted: int) -> Generation:
    """A prompt whose steps emitted these numbers of tokens, in blocks of 4."""
    generation = Generation()
    for count in emitted:
        step(generation, [1] * (count - 1), 1)
    return generation


def test_a_step_that_accepts_nothing_counts_one() -> None:
    generation = step(Generation(), [], 5)
    assert (generation.token_ids, generation.emitted, generation.accepted) == ([5], [1], [0])
    assert acceptance_length([generation]) == 1.0


def test_a_step_that_accepts_all_counts_the_block() -> None:
    assert acceptance_length([step(Generation(), [1, 2, 3], 4)]) == 4.0


@pytest.mark.parametrize(
    ("drafts", "bonus", "tokens", "accepted", "drafted"),
    [
        ([1, 7, 3], 4, [1, 7], 2, 2),  # the second draft ends the answer: slot 3 and the bonus never were
        ([9, 2, 3], 4, [9], 1, 1),  # another end id, as first draft
        ([1], 7, [1, 7], 1, 3),  # the bonus ends it: slots 2 and 3 were drafted and rejected
        ([], 9, [9], 0, 3),
    ],
)
def test_the_answer_stops_at_an_end_token(
    drafts: list[int], bonus: int, tokens: list[int], accepted: int, drafted: int
) -> None:
    generation = step(Generation(), drafts, bonus)
    assert generation.token_ids == tokens
    assert generation.finished == "end"
    assert (generation.emitted, generation.accepted, generation.drafted) == (
        [len(tokens)],
        [accepted],
        [drafted],
    )


def test_the_answer_stops_at_the_limit() -> None:
    generation = Generation()
    generation.first(5, limit=4, eos_ids=END)
    step(generation, [1, 2, 3], 4, limit=4)
    assert generation.token_ids == [5, 1, 2, 3]
    assert (generation.emitted, generation.accepted, generation.drafted) == ([3], [3], [2])
    assert generation.finished == "length"


def test_pooled_over_prompts_not_a_mean_of_means() -> None:
    """Three prompts: 4 tokens in 1 step, 6 in 4, 2 in 2: 12 / 7, where the mean of means is 2.17."""
    generations = [with_steps(4), with_steps(2, 1, 1, 2), with_steps(1, 1)]
    assert acceptance_length(generations) == 12 / 7
    assert acceptance_by_position(generations, 4) == ([3, 1, 1], [7, 7, 7])
    report = acceptance_report(generations, 4)
    assert report["acceptance_by_position"] == [3 / 7, 1 / 7, 1 / 7]
    assert (report["prompts"], report["steps"], report["tokens"]) == (3, 7, 12)


def test_no_step_at_all_is_one() -> None:
    assert acceptance_length([Generation()]) == 1.0
    assert acceptance_by_position([Generation()], 4) == ([0, 0, 0], [0, 0, 0])


def test_the_interval_is_of_prompts_and_always_the_same() -> None:
    generations = [with_steps(*([2] * 10)), with_steps(*([1] * 10))] * 8
    mean, low, high = acceptance_interval(generations, 4)
    assert (mean, low, high) == acceptance_interval(generations, 4)
    assert mean == acceptance_length(generations)
    assert 1.2 < low < 1.5 < high < 1.8
    # 16 prompts, eight of each kind: the deviation of the mean is 0.5 / 4, half an interval 1.96 times that.
    assert abs((high - low) / 2 - 1.96 * 0.125) < 0.03
    assert acceptance_interval([with_steps(3)] * 5, 4) == (3.0, 3.0, 3.0)


def test_one_prompt_gives_no_interval() -> None:
    assert acceptance_interval([with_steps(2, 2)], 8) == (2.0, 1.0, 8.0)
    assert acceptance_interval([with_steps(2, 2), Generation()], 8) == (2.0, 1.0, 8.0)


def test_bfloat16_steps_by_hand() -> None:
    """At 8.0 the spacing is 1/16, at 3.0 it is 1/64."""
    assert bfloat16_steps([8.0, 3.0, -3.0], [7.9375, 2.0, -3.03125]).tolist() == [1.0, 64.0, 2.0]


def test_divergences_name_the_first_token_and_its_margin() -> None:
    margins = {(0, 1): 1.5, (1, 1): 80.0}
    plain = [Generation([1, 2, 3]), Generation([4, 5]), Generation([6])]
    speculative = [Generation([1, 8, 3]), Generation([4, 6]), Generation([6])]
    first, second = find_divergences(plain, speculative, lambda *place: margins[place])
    assert (first.prompt, first.position, first.margin_steps, first.near_tie) == (0, 1, 1.5, True)
    assert (second.prompt, second.position, second.margin_steps, second.near_tie) == (1, 1, 80.0, False)


def test_an_output_that_ends_earlier_is_no_near_tie() -> None:
    [shorter] = find_divergences([Generation([1, 2])], [Generation([1])], lambda *place: 0.0)
    assert (shorter.position, shorter.near_tie) == (1, False)
