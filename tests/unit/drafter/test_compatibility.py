"""Drafter settings that do not fit a target are reported from its config.json, before data is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_core.config import DrafterConfig
from dflash_core.drafter.compatibility import check_compatible
from dflash_core.errors import UserError


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"target_layer_ids": (1, 9)},
            "target_layer_ids: [1, 9] is not allowed; allowed: .* 0 to 5 of",
        ),
        ({"target_layer_ids": (2, 1)}, "target_layer_ids: [2, 1] is not allowed"),
        (
            {"num_captured_layers": 5},
            "num_captured_layers: 5 is not allowed for a target of 6 layers",
        ),
        ({"target_layer_ids": (1, 3), "mask_token_id": 100}, "mask_token_id: 100 .* 0 to 99"),
        ({"target_layer_ids": (1, 3), "mask_token_id": 99}, None),
    ],
)
def test_settings_and_target(tmp_path: Path, settings: dict, message: str | None, nested: bool) -> None:
    text = {"num_hidden_layers": 6, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    drafter = DrafterConfig(**{"mask_token_id": 3, **settings})
    if message is None:
        check_compatible(tmp_path, drafter)
        return
    pattern = message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UserError, match=f"^drafter.{pattern}"):
        check_compatible(tmp_path, drafter)


def test_a_config_with_neither_key_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_compatible(tmp_path, DrafterConfig(target_layer_ids=(1, 900), mask_token_id=10**6))
