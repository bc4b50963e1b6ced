"""Inputs that decide an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import DataConfig, EvaluationConfig
from tasks.evaluate import evaluate_drafter, evaluation_key_inputs
from tasks.storage.file_digests import FileDigests


def test_the_template_and_columns_that_render_prompt_files_decide_an_evaluation(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "a.jinja", "b.jinja"):
        (tmp_path / name).write_text(name)

    def inputs(template: str | None, *prompts: str, **rules: Any) -> dict[str, Any]:
        return evaluation_key_inputs(
            EvaluationConfig(prompts=prompts),
            drafter_directory=tmp_path,
            target_fingerprint="t",
            sets=[],
            data=DataConfig(chat_template=template and str(tmp_path / template), **rules),
            digests=FileDigests(tmp_path),
        )

    def digest(template: str | None, *prompts: str, **rules: Any) -> object:
        return inputs(template, *prompts, **rules)["chat_template_digest"]

    assert digest("a.jinja", "p.jsonl") != digest("b.jinja", "p.jsonl")
    assert digest(None, "p.jsonl") is None
    with_arguments = digest(None, "p.jsonl", template_arguments={"enable_thinking": False})
    assert with_arguments not in (None, digest(None, "p.jsonl", template_arguments={"enable_thinking": True}))
    assert digest(None, "p.jsonl", template_date="2026-02-03") not in (None, with_arguments)
    # It also says where an answer ends, whatever the prompts are.
    assert digest("a.jinja") == digest("a.jinja", "p.jsonl")
    mapped = {"columns": {"prompt": "task"}}
    assert inputs(None, "p.jsonl", **mapped) != inputs(None, "p.jsonl")
    assert inputs(None, **mapped) == inputs(None)


def test_ranks_and_the_place_of_an_engine_do_not_decide_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("tasks.evaluate.engine_version", lambda python, field: "0.9")

    def key(**settings: Any) -> str:
        inputs = evaluation_key_inputs(
            EvaluationConfig(**settings),
            drafter_directory=tmp_path,
            target_fingerprint="t",
            sets=[],
            data=DataConfig(),
            digests=FileDigests(tmp_path),
        )
        return evaluate_drafter.key({**inputs, "where": {}})

    assert key(num_ranks=4, engine_python="/x/python") == key()
    keys = [key(), key(engine="vllm"), key(temperature=1.0), key(num_single_prompts=3), key(num_prompts=3)]
    assert len(set(keys)) == len(keys)
