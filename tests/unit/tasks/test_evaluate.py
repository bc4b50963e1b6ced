"""Inputs that decide an evaluation."""

from __future__ import annotations

from pathlib import Path

from dflash_core.config import DataConfig, EvaluationConfig
from tasks.evaluate import evaluation_key_inputs
from tasks.storage.file_digests import FileDigests


def test_the_template_that_renders_prompt_files_decides_an_evaluation(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "a.jinja", "b.jinja"):
        (tmp_path / name).write_text(name)

    def digest(template: str | None, *prompts: str) -> object:
        inputs = evaluation_key_inputs(
            EvaluationConfig(prompts=prompts),
            drafter_directory=tmp_path,
            target_fingerprint="t",
            sets=[],
            data=DataConfig(chat_template=template and str(tmp_path / template)),
            digests=FileDigests(tmp_path),
        )
        return inputs["chat_template_digest"]

    assert digest("a.jinja", "p.jsonl") != digest("b.jinja", "p.jsonl")
    assert digest(None, "p.jsonl") is None
    # It also says where an answer ends, whatever the prompts are.
    assert digest("a.jinja") == digest("a.jinja", "p.jsonl")
