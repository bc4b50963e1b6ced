"""Settings that would write outside the storage root or record a secret are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_core.config import RESERVED_NAMES, RunConfig, from_dict
from dflash_core.errors import UserError

BAD_NAMES = ["../escape", "/abs", "a/b", "", ".", "..", ".hidden", "-x", "a\n", "a b", "x" * 101]


@pytest.mark.parametrize("name", [*BAD_NAMES, *RESERVED_NAMES, "Store"])
def test_a_deployment_is_a_plain_name(name: str) -> None:
    with pytest.raises(UserError, match=r"^deployment: .* is not allowed; allowed: "):
        RunConfig(deployment=name)


def test_an_experiment_is_a_plain_name() -> None:
    with pytest.raises(UserError, match=r"^tracking\.experiment: '\.\./x' is not allowed"):
        from_dict(RunConfig, {"tracking": {"experiment": "../x"}})


@pytest.mark.parametrize("name", ["default", "compare-quickstart", "a.b_c-1", "_x", "x" * 100])
def test_plain_names_are_allowed(name: str) -> None:
    assert RunConfig(deployment=name).deployment == name


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tracking": {"uri": "http://me:hunter2@host"}}, "tracking.uri"),
        ({"tracking": {"uri": "postgresql://me:hunter2@host/db"}}, "tracking.uri"),
        ({"training": {"on_failure": "curl -H 'Authorization: Bearer hunter2' x"}}, "training.on_failure"),
        ({"training": {"on_failure": "https://hooks.slack.com/services/hunter2"}}, "training.on_failure"),
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_repeated(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match="env:NAME") as caught:
        from_dict(RunConfig, settings)
    assert str(caught.value).startswith(f"{field}: ")
    assert "hunter2" not in str(caught.value)
