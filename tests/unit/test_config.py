"""What of the settings enters a key."""

from __future__ import annotations

from dflash_core.config import DataConfig, RunConfig, decisive, from_dict, to_dict


def test_an_optional_setting_enters_a_key_where_it_differs_from_its_default() -> None:
    assert "template_arguments" not in decisive(RunConfig())["data"]
    changed = from_dict(RunConfig, {"data": {"template_arguments": {"enable_thinking": False}}})
    assert decisive(changed)["data"]["template_arguments"] == {"enable_thinking": False}
    assert from_dict(RunConfig, to_dict(changed)) == changed
    assert DataConfig().template_arguments == {}
