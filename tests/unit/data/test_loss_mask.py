"""Turns that are rendered but not supervised."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.data.loss_mask import supervised_turns
from dflash_core.data.template import TemplateError

MESSAGES: list[dict[str, Any]] = [{"role": role} for role in ("user", "assistant") * 3]
TURNS = [(1, 2), (3, 4), (5, 6)]


def test_unsupervised_turns_are_dropped_by_the_number_of_their_message() -> None:
    assert supervised_turns(TURNS, MESSAGES, frozenset({3})) == [(1, 2), (5, 6)]
    assert supervised_turns(TURNS, MESSAGES, frozenset({1, 5})) == [(3, 4)]
    assert supervised_turns([None, *TURNS[1:]], MESSAGES, frozenset({3})) == [(5, 6)]
    # A template that rewrites earlier turns leaves the last one.
    assert supervised_turns(TURNS[2:], MESSAGES, frozenset({1, 3})) == [(5, 6)]


@pytest.mark.parametrize(
    ("turns", "unsupervised", "reason"),
    [
        (TURNS, {1, 3, 5}, "no supervised turn"),
        (TURNS[2:], {5}, "no supervised turn"),
        (TURNS[1:], {5}, "unsupervised turn not found"),
    ],
)
def test_a_row_without_a_supervised_turn_is_rejected(
    turns: list[tuple[int, int]], unsupervised: set[int], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        supervised_turns(turns, MESSAGES, frozenset(unsupervised))
