"""Drafter settings that don't fit a target are told from its config.json, before data is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_core.config import DrafterConfig
from dflash_core.errors import UserError
from tasks.target import check_drafter


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "settings, named",
    [
        (
            {"target_layer_ids": (1, 9)},
            "drafter.target_layer_ids: [1, 9] is not allowed; allowed: .* 0 to 5 of",
        ),
        ({"target_layer_ids": (2, 1)}, "drafter.target_layer_ids: [2, 1] is not allowed"),
        (
            {"num_captured_layers": 5},
            "drafter.num_captured_layers: 5 is not allowed for a target of 6 layers",
        ),
        ({"target_layer_ids": (1, 3), "mask_token_id": 100}, "drafter.mask_token_id: 100 .* 0 to 99"),
        ({"target_layer_ids": (1, 3), "mask_token_id": 99}, None),
    ],
)
def test_settings_and_target(tmp_path: Path, settings: dict, named: str | None, nested: bool) -> None:
    text = {"num_hidden_layers": 6, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text} if nested else text))
    drafter = DrafterConfig(**{"mask_token_id": 3, **settings})
    if named is None:
        check_drafter(tmp_path, drafter)
        return
    with pytest.raises(UserError, match=named.replace("[", r"\[").replace("]", r"\]")):
        check_drafter(tmp_path, drafter)


def test_a_config_that_says_neither_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_drafter(tmp_path, DrafterConfig(target_layer_ids=(1, 900), mask_token_id=10**6))
