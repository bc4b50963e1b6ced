"""The tokens that end an answer: of the configs, of the tokenizer, and of the chat template alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.errors import UserError
from dflash_core.target.end_ids import configured_end_ids, end_ids, ends_unknown_to_engines
from tests.support.chat_families import CONTROLS, LLAMA, small_tokenizer

ENDOFTEXT, IM_END, EOT = (CONTROLS.index(text) for text in ("<|endoftext|>", "<|im_end|>", "<|eot|>"))


def tokenizer(**changes: Any) -> Any:
    """Return the tokenizer of a target whose EOS is not the token that its chat template writes."""
    changed = copy.deepcopy(small_tokenizer())
    changed.eos_token = "<|endoftext|>"
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def test_an_answer_ends_where_configs_tokenizer_or_template_say(tmp_path: Path) -> None:
    assert end_ids((7,), tokenizer(), DataConfig()) == (ENDOFTEXT, IM_END, 7)
    assert end_ids((), tokenizer(eos_token=None), DataConfig()) == (IM_END,)
    (tmp_path / "llama.jinja").write_text(LLAMA)
    own = DataConfig(chat_template=str(tmp_path / "llama.jinja"))
    assert end_ids((), tokenizer(), own) == (ENDOFTEXT, EOT)


def test_without_a_template_configs_and_tokenizer_remain(tmp_path: Path) -> None:
    assert end_ids((7,), tokenizer(chat_template=None), DataConfig()) == (ENDOFTEXT, 7)
    missing = DataConfig(chat_template=str(tmp_path / "missing.jinja"))
    with pytest.raises(UserError, match="data.chat_template: .*missing.jinja' cannot be read"):
        end_ids((7,), tokenizer(chat_template=None), missing)


@pytest.mark.parametrize(
    "generation_config, config, expected",
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, (7, 8)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 0}, (0,)),
        (None, {"text_config": {"eos_token_id": 9}}, (9,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_ends_of_the_configs(tmp_path: Path, generation_config: Any, config: Any, expected: Any) -> None:
    for name, values in (("generation_config.json", generation_config), ("config.json", config)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    assert configured_end_ids(tmp_path) == expected


def test_an_end_that_engines_do_not_know_is_named_with_those_that_they_know(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDOFTEXT}))
    added, remark = ends_unknown_to_engines(tmp_path, tokenizer(), DataConfig())
    assert added == (IM_END,)
    assert f"{IM_END} '<|im_end|>'" in remark
    assert f"{ENDOFTEXT} '<|endoftext|>'" in remark
    assert ends_unknown_to_engines(tmp_path, small_tokenizer(), DataConfig()) == ((), "")
