"""Data sets in this package: their names, and what the quickstart's holds."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.packaged_data import KINDS, prompts
from dflash_core.data.packaged_files import packaged_path
from dflash_core.errors import UserError

QUICKSTART = "package://smollm2-boilerplate.jsonl"


def test_other_names_are_no_packaged_files() -> None:
    assert packaged_path("chats/*.jsonl") is None
    assert packaged_path("hf://datasets/a/b") is None


@pytest.mark.parametrize("name", ["package://", "package://../config.py", "package://missing.jsonl"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UserError) as error:
        packaged_path(name)
    assert str(error.value) == f"data.files: {name!r} is not in this package; allowed: {QUICKSTART}"


def test_the_quickstarts_data_are_answers_to_the_prompts_of_the_script() -> None:
    path = packaged_path(QUICKSTART)
    assert path is not None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kind"], row["messages"][0]["content"]) for row in rows] == prompts()
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(KINDS, 209)
    assert all(row["messages"][1]["content"] for row in rows)
