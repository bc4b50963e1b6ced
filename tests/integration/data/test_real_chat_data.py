"""Public chat data that is not part of the project: counts, token ids and loss masks against known values.

Set DFLASH_SHARED_DATA to a directory with `train/` and `eval/`, or put one next to the repository as
`../shared/data`; without it these tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash_core.config import DataConfig
from dflash_core.data.containers import read_rows
from dflash_core.data.ingest import ingest_file
from dflash_core.data.prompts import read_prompts
from dflash_core.data.store import TokenStore

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("DFLASH_SHARED_DATA", ROOT.parent / "shared" / "data"))
MASK_TOKEN_ID = 16
# File: format, conversations, assistant turns that are not blank, least number of repeated rows, longest in
# tokens.
TRUTH = {
    "sharegpt_toolcall_en.json": ("sharegpt", 300, 957, 35, 11_632),
    "messages_en.json": ("messages", 300, 487, 0, 4_492),
    "messages_short_1k.jsonl": ("messages", 1000, 1100, 0, 138),
    "messages_parts_500.jsonl": ("messages", 500, 500, 1, 606),
    "alpaca_en.json": ("alpaca", 999, 999, 14, 751),
    "codegen_instruct.jsonl": ("alpaca", 2500, 2500, 0, 467),
    "gsm8k_3000.parquet": ("messages", 3000, 3000, 0, 570),
}
Shard = tuple[dict[str, Any], TokenStore]

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no chat data at {DATA}; see the head of this file"
)


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def shards(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shard]:
    out = tmp_path_factory.mktemp("shards")
    config = DataConfig(max_length=20_000, max_reject_share=0.0)
    manifests = {
        name: ingest_file(DATA / "train" / name, config, tokenizer, out / name, mask_token_id=MASK_TOKEN_ID)
        for name in TRUTH
    }
    return {name: (manifest, TokenStore.open([out / name])) for name, manifest in manifests.items()}


def supervised_runs(mask: np.ndarray) -> int:
    return int(np.count_nonzero(np.diff(np.concatenate([[0], mask.astype(np.int8)])) == 1))


@pytest.mark.parametrize("name", TRUTH)
def test_counts_are_the_known_ones(shards: dict[str, Shard], name: str) -> None:
    manifest, store = shards[name]
    format_name, rows, turns, repeats, longest = TRUTH[name]
    assert manifest["meta"]["format"] == format_name
    assert (manifest["num_rows"], manifest["num_samples"], manifest["num_rejected"]) == (rows, rows, 0)
    assert sum(supervised_runs(store.loss_mask(i)) for i in range(len(store))) == turns
    assert manifest["num_duplicates"] >= repeats
    assert manifest["max_length"] == longest


@pytest.mark.parametrize("name", ["messages_en.json", "messages_short_1k.jsonl", "gsm8k_3000.parquet"])
def test_ids_are_those_of_the_template_and_masks_decode_to_the_answers(
    shards: dict[str, Shard], tokenizer: Any, name: str
) -> None:
    _, store = shards[name]
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    rows = [row.value["messages"] for row in itertools.islice(read_rows(DATA / "train" / name), 300)]
    for number, messages in enumerate(rows):
        messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        if any(control in m["content"] for control in controls for m in messages):
            continue
        expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert store.token_ids(number).tolist() == expected
        answers = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
        supervised = store.token_ids(number)[store.loss_mask(number).astype(bool)]
        assert tokenizer.decode(supervised) == answers


def test_text_that_looks_like_control_tokens_stays_text(shards: dict[str, Shard], tokenizer: Any) -> None:
    _, store = shards["messages_en.json"]
    for row in (140, 258):  # counted from 1
        text = tokenizer.decode(store.token_ids(row - 1))
        assert any(control in text for control in ("</s>", "<|user|>"))
    parts = shards["messages_parts_500.jsonl"][1]
    assert "{{name}}" in tokenizer.decode(parts.token_ids(0))


def test_over_long_rows_are_rejected_with_their_line(tokenizer: Any, tmp_path: Path) -> None:
    path = DATA / "train" / "sharegpt_toolcall_en.json"
    manifest = ingest_file(path, DataConfig(), tokenizer, tmp_path / "s", mask_token_id=MASK_TOKEN_ID)
    assert manifest["rejects"] == {"over length": 1}
    line = pq.read_table(tmp_path / "s" / "rejects.parquet")["line"][0].as_py()
    text = path.read_text(encoding="utf-8").split("\n")
    rows_before = sum(line_text == "  {" for line_text in text[: line - 1])
    # The 244th row.
    assert rows_before == 243
    assert text[line - 1].strip() == "{"


def test_all_files_in_one_store(shards: dict[str, Shard], tmp_path: Path) -> None:
    directories = [store.shards[0] for _, store in shards.values()]
    store = TokenStore.open(directories)
    assert len(store) == 8599
    sides: dict[bytes, set[bool]] = {}
    for i in range(len(store)):
        content = store.token_ids(i).tobytes() + store.loss_mask(i).tobytes()
        sides.setdefault(content, set()).add(bool(store.is_validation[i]))
    assert all(len(side) == 1 for side in sides.values())
    # 1% of 8,599 within a factor of two.
    assert 43 <= len(store.validation_indices) <= 172


def test_prompt_sets_have_the_known_sizes() -> None:
    counts = {path.name: read_prompts(path) for path in sorted((DATA / "eval").glob("*.jsonl"))}
    assert {name: len(prompts) for name, prompts in counts.items()} == {
        "gsm8k_80.jsonl": 80,
        "humaneval_164.jsonl": 164,
        "mt_bench_80.jsonl": 80,
    }
    assert all(len(prompt.follow_ups) == 1 for prompt in counts["mt_bench_80.jsonl"])
    first = json.loads((DATA / "eval" / "mt_bench_80.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert counts["mt_bench_80.jsonl"][0].category == first["category"]
