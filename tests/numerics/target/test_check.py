"""The check of a target finds the fastest right mode, in which answers are transformers' own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.target_families import FAMILIES, make_family
from benchmarks.target_matrix import is_as_stated, try_family
from dflash_core.errors import UserError
from dflash_core.target.check import check_target
from dflash_core.target.mode import CHECK_FILE, EAGER, FAST, PADDED, TargetMode
from dflash_core.target.target import Target

# One or two families for each mode; `benchmarks.target_matrix` has all.
NAMES = ("qwen3", "nemotron", "lfm2", "qwen3.5", "recurrent gemma", "llama4", "doge", "glm dsa", "xglm")


@pytest.mark.parametrize("name", NAMES)
def test_a_family_runs_as_stated_and_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    outcome = try_family(tmp_path, name)
    assert not outcome.is_silent, outcome.note
    assert is_as_stated(name, outcome), outcome


def test_the_outcome_holds_figures_reasons_and_sizes(tmp_path: Path) -> None:
    check = check_target(make_family(tmp_path, "lfm2"))
    assert check.mode == PADDED
    assert check.dtype == "float32"
    packed = "packed, exchanged attention"
    assert check.reasons.keys() == {packed}
    assert check.differences[packed] > 0.05
    assert max(d for path, d in check.differences.items() if path != packed) < 1e-5
    assert (check.shape["hidden_size"], check.shape["num_layers"], check.max_tokens) == (64, 4, None)
    assert json.loads(json.dumps(check.as_dict()))["mode"] == {
        "eager": False,
        "can_pack": False,
        "can_cache": False,
    }


def test_rotary_factors_that_depend_on_the_microbatch_limit_the_length(tmp_path: Path) -> None:
    assert check_target(make_family(tmp_path, "longrope")).max_tokens == 128


def test_a_wrong_path_is_seen_in_bfloat16_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.target.check.FLOAT32_BYTES", 0)
    for name, mode in (("qwen3", FAST), ("lfm2", PADDED), ("llama4", EAGER)):
        check = check_target(make_family(tmp_path / name, name), compute_dtype="bfloat16")
        assert (check.mode, check.dtype) == (mode, "bfloat16")


def test_a_target_that_no_mode_computes_right_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = Target.capture

    def off(self: Target, *args: Any, **kwargs: Any) -> Any:
        features = capture(self, *args, **kwargs)
        return replace(features, hidden=features.hidden + 1.0)

    monkeypatch.setattr(Target, "capture", off)
    message = "llama computes otherwise here than alone in transformers .*differs by"
    with pytest.raises(UserError, match=message):
        check_target(make_family(tmp_path, "llama"))


@pytest.mark.parametrize("mode", [FAST, PADDED, EAGER])
def test_loading_follows_the_outcome_next_to_the_model(tmp_path: Path, mode: TargetMode) -> None:
    make_family(tmp_path / "model", "llama")
    outcome = {"eager": mode.eager, "can_pack": mode.can_pack, "can_cache": mode.can_cache}
    (tmp_path / CHECK_FILE).write_text(json.dumps({"mode": outcome}))
    target = Target.load(tmp_path / "model", layer_ids=[1], compute_dtype="float32")
    assert target.mode == mode
    assert (target.model.config._attn_implementation == "eager") == mode.eager


def test_every_row_of_the_table_names_its_targets() -> None:
    assert all(family.models and family.config for family in FAMILIES.values())
