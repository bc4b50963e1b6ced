"""Stage `regenerate` with a real target: what it writes, and what its key holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.config import DataConfig, RunConfig, from_dict, regenerated_data, to_dict
from dflash_core.target.target import Target
from tasks.ingest import Source, ingest
from tasks.regenerate import regenerate, regenerate_inputs, target_for_all_files, where_of
from tasks.storage.file_digests import FileDigests

PROMPTS = ["def area", "for name in names:", "The target accepts the longest run it would have written", "if"]


def test_the_stage_writes_what_ingest_reads(tmp_path: Path, tiny_target_dir: Path) -> None:
    rows = [{"id": n, "instruction": text, "output": "old"} for n, text in enumerate(PROMPTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: RunConfig = from_dict(
        RunConfig,
        {
            "target": {"name": str(tiny_target_dir), "compute_dtype": "float32"},
            "data": {"max_reject_share": 1.0},
            "regenerate": {"enabled": True, "max_new_tokens": 6, "batch_size": 2},
            "training": {"device": "cpu"},
        },
    )
    source = Source(str(tmp_path / "a.jsonl"), FileDigests(tmp_path).of(tmp_path / "a.jsonl"))
    target = {"fingerprint": "f", "tokenizer_fingerprint": "t"}
    inputs = regenerate_inputs(config, source, target=target, digests=FileDigests(tmp_path))
    where = where_of(config, source, tmp_path, tiny_target_dir)
    outputs = []
    with target_for_all_files():
        # The second time from the answers on disk.
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            outputs.append(regenerate.write(tmp_path / name, **inputs, where=where))
    first, second = outputs
    assert first["digest"] == second["digest"]
    assert (first["num_answers"], first["num_cached"], second["num_cached"]) == (4, 0, 4)
    written = [json.loads(line) for line in (tmp_path / "one" / "a.jsonl").read_text().splitlines()]
    assert [row["id"] for row in written] == [0, 1, 2, 3]
    assert written[0]["regenerated_by"] == {
        "model": tiny_target_dir.name,
        "fingerprint": "f",
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 6,
    }
    shard = ingest.write(
        tmp_path,
        source_digest=first["digest"],
        source_name="a.jsonl",
        tokenizer_fingerprint="t",
        rules={"mask_token_id": None},
        path=str(tmp_path / "one" / "a.jsonl"),
        data=to_dict(regenerated_data(config.data)),
        target_directory=str(tiny_target_dir),
        trust_remote_code=False,
    )
    assert shard["num_rows"] == 4
    assert shard["num_samples"] + shard["num_rejected"] == 4
    assert isinstance(regenerated_data(DataConfig(columns={"prompt": "x"})), DataConfig)


def test_an_answer_ends_at_an_end_of_turn_that_only_the_template_knows(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third token of each answer is the template's end of turn, and the configs name another token."""
    directory = tmp_path / "target"
    shutil.copytree(tiny_target_dir, directory)
    for name, eos in (("generation_config.json", 0), ("tokenizer_config.json", "<|endoftext|>")):
        values = json.loads((directory / name).read_text())
        values["eos_token_id" if isinstance(eos, int) else "eos_token"] = eos
        (directory / name).write_text(json.dumps(values))
    calls, logits = [], Target.logits

    def ends_third(target: Target, hidden: torch.Tensor) -> torch.Tensor:
        out = logits(target, hidden)
        calls.append(0)
        out[..., 2] = 1e6 if len(calls) % 3 == 0 else -1e6
        return out

    monkeypatch.setattr(Target, "logits", ends_third)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "def area", "response": "old"}) + "\n")
    config = from_dict(
        RunConfig,
        {
            "target": {"name": str(directory), "compute_dtype": "float32"},
            "regenerate": {"enabled": True, "max_new_tokens": 8},
            "training": {"device": "cpu"},
        },
    )
    source = Source(str(tmp_path / "a.jsonl"), FileDigests(tmp_path).of(tmp_path / "a.jsonl"))
    target = {"fingerprint": "f", "tokenizer_fingerprint": "t"}
    inputs = regenerate_inputs(config, source, target=target, digests=FileDigests(tmp_path))
    (tmp_path / "out").mkdir()
    with target_for_all_files():
        where = where_of(config, source, tmp_path, directory)
        pointer = regenerate.write(tmp_path / "out", **inputs, where=where)
    row = json.loads((tmp_path / "out" / "a.jsonl").read_text())
    assert (pointer["num_cut"], pointer["num_tokens"]) == (0, 3)
    assert row["messages"][1]["finish_reason"] == "stop"
    assert row["regenerated_by"]["end_ids"] == [0, 2]
    assert "answers also end at 2 '<|im_end|>'" in capsys.readouterr().out


def test_what_the_key_of_a_file_holds(tmp_path: Path, tiny_target_dir: Path) -> None:
    """Other sampling gives other answers; batch size and retries do not change them."""

    def key(target: str = "f", data: dict[str, Any] | None = None, **settings: Any) -> str:
        values = {"target": {"name": str(tiny_target_dir)}, "regenerate": {"enabled": True, **settings}}
        values["data"] = data or {}
        config = from_dict(RunConfig, values)
        source = Source(str(tmp_path / "a.jsonl"), "digest")
        known = {"fingerprint": target, "tokenizer_fingerprint": "t"}
        inputs = regenerate_inputs(config, source, target=known, digests=FileDigests(tmp_path))
        where = where_of(config, source, tmp_path, tiny_target_dir)
        return regenerate.key({**inputs, "where": where})

    assert key() == key(batch_size=1, concurrency=1, max_retries=0, timeout_seconds=1.0)
    assert key() == key(data={"template_arguments": {}})
    endpoint = {"base_url": "http://a/v1"}
    assert key(**endpoint) == key(target="other", **endpoint)
    keys = [key(), key(target="other"), key(seed=1), key(temperature=0.5), key(max_new_tokens=9)]
    keys += [
        key(cut_turns="closed"),
        key(**endpoint),
        key(**endpoint, model="m"),
        key(base_url="http://b/v1"),
        key(data={"template_arguments": {"enable_thinking": False}}),
        key(data={"template_date": "2026-01-01"}),
        key(data={"rewritten_history": "refuse"}),
    ]
    assert len(set(keys)) == len(keys)
