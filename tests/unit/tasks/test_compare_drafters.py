"""The report of a comparison of drafters: sums, denominators, and a sentence that the interval supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime.deployments import CompareDraftersOptions
from flows.steps.evaluation import drafters_and_prompts
from tasks.compare_drafters import Evaluated, names_of, summarise, to_markdown, verdict


def evaluated(name: str, length: float) -> Evaluated:
    figures = {
        "acceptance_length": length,
        "acceptance_interval": [1.0, 2.0],
        "acceptance_by_position": [0.5],
        "prompts": 2,
        "steps": 4,
        "lossless": True,
        "protocol": {"temperature": 0.0},
        "one_at_a_time": None,
    }
    return Evaluated(name=name, directory=f"/d/{name}", pointer={"evaluation": figures, "key": name})  # type: ignore[typeddict-item]


def records(*emitted: list[int], singles: bool = False) -> list[dict[str, Any]]:
    rows = [
        {"prompt": i, "prompt_set": "chat", "prompt_tokens": 3, "emitted": steps}
        for i, steps in enumerate(emitted)
    ]
    for row in rows if singles else []:
        row["one_at_a_time"] = [8, 4.0, 8, 2.0]
    return rows


BETTER = records([2, 2], [2, 2], singles=True)
WORSE = records([1, 1, 1, 1], [2, 2], singles=True)


def compared(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, Any]:
    return summarise(RunConfig(), [evaluated("a", 1.2), evaluated("b", 1.6)], [first, second])


def test_the_report_has_sums_and_denominators() -> None:
    text = to_markdown(compared(WORSE, BETTER))
    row = "| b - a | chat | 2 | 1.333 = 8 / 6 | 2.000 = 8 / 4 | +0.667 (95%: +0.000 to +1.000) |"
    assert row in text
    assert "| b - a | all | 2 | 2.000 = (16 / 4.0 s) / (16 / 8.0 s) |" in text
    assert "Protocol of the first: temperature 0.00, 2 prompts, 4 steps." in text
    assert "- b: `/d/b`" in text


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (WORSE, BETTER, "No difference in acceptance length between b and a is shown: +0.667"),
        (
            records([1, 1], [1, 1]),
            BETTER,
            "b is accepted longer than a: b - a = +1.000 (95%: +1.000 to +1.000)",
        ),
        (
            BETTER,
            records([1, 1], [1, 1]),
            "a is accepted longer than b: b - a = -1.000 (95%: -1.000 to -1.000)",
        ),
        (records([1]), records([2]), "b against a: too few prompts for an interval."),
    ],
)
def test_the_sentence_says_what_the_interval_supports(
    first: list[dict[str, Any]], second: list[dict[str, Any]], expected: str
) -> None:
    [pair] = compared(first, second)["differences"]
    assert verdict(pair).startswith(expected)


def test_every_two_of_three_drafters_are_compared() -> None:
    three = [evaluated(name, 1.5) for name in "abc"]
    pairs = summarise(RunConfig(), three, [WORSE, BETTER, WORSE])["differences"]
    assert [(pair["first"], pair["second"]) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_drafters_are_named_by_their_place() -> None:
    root = Path("/runs")
    directories = [root / "quickstart" / "abc" / "drafter", Path("/x/mine"), Path("/y/mine")]
    assert names_of(directories, root) == ["quickstart/abc", "mine", "mine (3)"]


def test_fewer_than_two_drafters_and_one_twice_are_rejected(tmp_path: Path) -> None:
    drafter = tmp_path / "one"
    drafter.mkdir()
    for name in ("config.json", "model.safetensors"):
        (drafter / name).write_text("{}")
    config = RunConfig(storage_root=str(tmp_path / "runs"))

    def chosen(*paths: Path) -> None:
        drafters_and_prompts(config, CompareDraftersOptions(drafter_paths=tuple(map(str, paths))))

    with pytest.raises(UserError, match="drafter_paths: none is not allowed"):
        chosen()
    with pytest.raises(UserError, match="drafter_paths: .*one' is named twice"):
        chosen(drafter, drafter)
    with pytest.raises(UserError, match="drafter_paths: .*latest' holds no drafter"):
        chosen(drafter)
