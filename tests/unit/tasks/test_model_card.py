"""The model card: front matter that YAML reads, tables, and nothing of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.model_card import hub_name, model_card

RUN: dict[str, Any] = {
    "run_key": "k" * 32,
    "config": {"target": {"name": "smollm2-135m-instruct"}, "storage_root": "/home/me/runs"},
    "paths": {"target": "/home/me/target"},
    "fields": {"data": "d1", "target": "t1", "training.seed": 0, "optimizer.lr": 6e-4},
    "made_with": {"torch": "2.11.0"},
}
SUMMARY = {"steps": 445, "samples": 7120, "tokens": 1_000_000}
CONFIG = {"block_size": 4, "num_hidden_layers": 1}
EVALUATION = {
    "acceptance_length": 2.0,
    "acceptance_interval": [1.5, 2.5],
    "acceptance_by_position": [0.6, 0.3, 0.1],
    "prompts": 24,
    "lossless": True,
}


def test_front_matter_tables_and_commands() -> None:
    card = model_card(RUN, SUMMARY, CONFIG, EVALUATION)
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "tags": ["dflash", "speculative-decoding", "draft-model"],
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    assert "| all | 24 | 2.000 | 1.500 to 2.500 | 0.600, 0.300, 0.100 |" in text
    assert '"num_speculative_tokens": 3' in text
    assert "--speculative-num-draft-tokens 4" in text
    assert "| data (digest) | d1 |" in text
    assert "/home/me" not in card


def test_before_the_evaluation_it_says_so() -> None:
    assert "Not evaluated yet." in model_card(RUN, SUMMARY, CONFIG, {})


def test_a_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-value-1234")
    run = RUN | {"made_with": {"torch": "secret-value-1234"}}
    assert "secret-value-1234" not in model_card(run, SUMMARY, CONFIG, {})


def test_a_target_of_this_machine_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert hub_name(str(tmp_path)) is None
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("models/mine") is None
    assert "base_model" not in model_card(
        RUN | {"config": {"target": {"name": "/srv/model"}}}, SUMMARY, CONFIG, {}
    )
