"""What decides a target: its files, and the tokenizer's alone."""

from __future__ import annotations

from pathlib import Path

from dflash_core.config import TargetConfig
from tasks.storage.file_digests import FileDigests
from tasks.target import identity, tokenizer_fingerprint


def test_named_chat_templates_decide_a_target_and_its_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "tokenizer.json").write_text("{}")
    target = TargetConfig(name=str(model))
    before = tokenizer_fingerprint(model), identity(target, FileDigests(tmp_path))
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    after = tokenizer_fingerprint(model), identity(target, FileDigests(tmp_path))
    assert before[0] != after[0]
    assert before[1] != after[1]
