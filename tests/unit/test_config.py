"""What of the settings enters a key, and values that are not allowed."""

from __future__ import annotations

import pytest

from dflash_core.config import DataConfig, RunConfig, TrainingConfig, decisive, from_dict, to_dict
from dflash_core.errors import UserError


def test_an_optional_setting_enters_a_key_where_it_differs_from_its_default() -> None:
    assert "template_arguments" not in decisive(RunConfig())["data"]
    changed = from_dict(RunConfig, {"data": {"template_arguments": {"enable_thinking": False}}})
    assert decisive(changed)["data"]["template_arguments"] == {"enable_thinking": False}
    assert from_dict(RunConfig, to_dict(changed)) == changed
    assert DataConfig().template_arguments == {}


def test_a_choice_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        UserError, match="data.rewritten_history: 'last_turn' .* allowed: unsupervised, refuse"
    ):
        from_dict(RunConfig, {"data": {"rewritten_history": "last_turn"}})


def test_a_time_limit_is_part_of_the_key_where_it_is_set() -> None:
    assert "max_minutes" not in decisive(TrainingConfig())
    assert decisive(TrainingConfig(max_minutes=3.0))["max_minutes"] == 3.0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"evaluation": {"engine": "vllm", "temperature": 1.0}}, "evaluation.engine: 'vllm' is not allowed"),
        (
            {"evaluation": {"num_ranks": 2}, "target": {"device_map": "auto"}},
            "evaluation.num_ranks: 2 is not",
        ),
        ({"evaluation": {"columns": {"ask": "q"}}}, "evaluation.columns: 'ask' is not allowed; .*turns"),
        ({"evaluation": {"num_single_prompts": 0}}, "evaluation.num_single_prompts: 0 is not .*>= 1"),
    ],
)
def test_evaluations_that_cannot_be_made_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(RunConfig, settings)
