"""Evaluation of prompt files: all turns of a row, with the target's own answers between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.tiny_target import MASK_TOKEN_ID
from dflash_core.config import DataConfig, DrafterConfig, to_dict
from dflash_core.decoding.speculate import Prompt, Sampling, plain_decode
from dflash_core.drafter.drafter import DFlashDrafter, drafter_shape
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tasks.decoding import PromptSets, decode_all

SAMPLING = Sampling(max_new_tokens=6, batch_size=2)
CODE = [
    {"question_id": 7, "category": "sums", "turns": ["Write the function that sums.", "Now with a loop."]},
    {"category": "points", "turns": ["class Point"]},
]
CHAT = [{"messages": [{"role": "user", "content": "What is None?"}, {"role": "assistant", "content": "x"}]}]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    loaded = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
    loaded.eos_ids = ()
    return loaded


def write_sets(directory: Path, target_dir: Path, **sets: list[dict[str, Any]]) -> tuple[list[Any], dict]:
    for name, rows in sets.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {
        "prompt_paths": [str(directory / f"{name}.jsonl") for name in sets],
        "target_directory": str(target_dir),
        "trust_remote_code": False,
        "data": to_dict(DataConfig()),
        "shards": [],
    }
    return [{"name": name, "digest": ""} for name in sets], where


def test_a_second_turn_follows_the_targets_own_first_answer(
    tmp_path: Path, tiny_target_dir: Path, target: Target
) -> None:
    shape = drafter_shape(
        target.config,
        DrafterConfig(num_layers=1, block_size=4, mask_token_id=MASK_TOKEN_ID),
        target.layer_ids,
    )
    names, where = write_sets(tmp_path, tiny_target_dir, code=CODE, chat=CHAT)
    sets = PromptSets(names, 10, where)
    found = decode_all(target, DFlashDrafter(shape), sets, SAMPLING)
    asked = [sets.tokenizer.decode(p.token_ids) for p in found.prompts]
    one = "<|im_start|>user\nWrite the function that sums.<|im_end|>\n<|im_start|>assistant\n"
    assert asked[:3] == [
        one,
        "<|im_start|>user\nclass Point<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWhat is None?<|im_end|>\n<|im_start|>assistant\n",
    ]
    first = plain_decode(target, [Prompt(token_ids=found.prompts[0].token_ids)], SAMPLING).generations[0]
    answer = sets.tokenizer.decode(first.token_ids, skip_special_tokens=True)
    assert asked[3:] == [f"{one}{answer}<|im_end|>\n<|im_start|>user\nNow with a loop.<|im_end|>\n"
                         "<|im_start|>assistant\n"]  # fmt: skip
    report = found.report()
    assert report["lossless"] is True and report["prompts"] == 4
    assert {name: s["prompts"] for name, s in report["sets"].items()} == {"code": 3, "chat": 1}
    assert {name: s["prompts"] for name, s in report["categories"].items()} == {
        "code/sums": 2,
        "code/points": 1,
    }
    assert [r["prompt_set"] for r in found.records()] == ["code", "code", "chat", "code"]


def test_prompts_per_set_are_limited_and_a_bad_row_is_named(tmp_path: Path, tiny_target_dir: Path) -> None:
    names, where = write_sets(tmp_path, tiny_target_dir, code=CODE, chat=CHAT)
    assert len(PromptSets(names, 1, where).first()[1]) == 2
    names, where = write_sets(tmp_path, tiny_target_dir, bad=[{"turns": []}])
    with pytest.raises(UserError, match=r"evaluation.prompts: .*bad.jsonl line 1: \[\] is not a prompt"):
        PromptSets(names, 10, where)
