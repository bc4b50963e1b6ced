"""Local batched decoding for regeneration: the same answers as one by one, and the stage around it."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.tiny_target import make_tiny_tokenizer
from dflash_core.config import DataConfig, RegenerateConfig, RunConfig, from_dict, to_dict
from dflash_core.data.answers import Answer, Request
from dflash_core.data.chat import Rejection
from dflash_core.decoding.generate import BatchDecoder
from dflash_core.decoding.speculate import Prompt, Sampling, plain_decode
from dflash_core.target.target import Target

PROMPTS = ["def area", "for name in names:", "The target accepts the longest run it would have written", "if"]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.load(tiny_target_dir, layer_ids=[0], compute_dtype="float32")


def requests(tokenizer: Any) -> deque[Request]:
    return deque(
        Request(f"{n:032x}", [], None, tokenizer(text)["input_ids"]) for n, text in enumerate(PROMPTS)
    )


def answers(target: Target, **settings: Any) -> dict[str, Answer | Rejection]:
    decoder = BatchDecoder(target, make_tiny_tokenizer(), RegenerateConfig(**settings), {"model": "tiny"})
    return {request.key: answer for request, answer in decoder.answers(requests(decoder.tokenizer))}


def test_batches_answer_as_one_by_one(target: Target) -> None:
    tokenizer = make_tiny_tokenizer()
    found = answers(target, batch_size=3, max_new_tokens=7)
    for request in requests(tokenizer):
        prompt = Prompt(token_ids=tuple(request.token_ids))
        [alone] = plain_decode(target, [prompt], Sampling(max_new_tokens=7)).generations
        answer = found[request.key]
        assert isinstance(answer, Answer)
        text = tokenizer.decode(alone.token_ids, skip_special_tokens=True)
        assert answer.message == {"role": "assistant", "content": text.rstrip("\ufffd")}
        assert (answer.finish_reason, answer.num_tokens) == ("length", 7)


def test_an_end_token_ends_an_answer_and_is_no_part_of_its_text(target: Target) -> None:
    first = plain_decode(target, [Prompt(token_ids=tuple(requests(make_tiny_tokenizer())[0].token_ids))],
                         Sampling(max_new_tokens=4)).generations[0].token_ids  # fmt: skip
    earlier, target.eos_ids = target.eos_ids, (first[2],)
    try:
        answer = answers(target, max_new_tokens=4)[f"{0:032x}"]
    finally:
        target.eos_ids = earlier
    assert isinstance(answer, Answer)
    assert (answer.finish_reason, answer.num_tokens) == ("stop", first.index(first[2]) + 1)


def test_sampled_answers_depend_on_the_prompt_and_the_seed_alone(target: Target) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 6}
    together = answers(target, batch_size=4, **sampled)
    assert together == answers(target, batch_size=1, **sampled)
    assert together != answers(target, batch_size=4, seed=1, **sampled)


def test_a_prompt_without_room_is_refused(target: Target) -> None:
    found = answers(target, max_new_tokens=2048)  # of 2,048 positions
    assert {type(answer) for answer in found.values()} == {Rejection}


def test_the_stage_writes_what_ingest_reads(tmp_path: Path, tiny_target_dir: Path) -> None:
    from tasks.ingest import Source, ingest
    from tasks.regenerate import (
        regenerate,
        regenerate_inputs,
        regenerated_data,
        target_for_all_files,
        where_of,
    )
    from tasks.storage.file_digests import FileDigests

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
    source = Source(str(tmp_path / "a.jsonl"), "digest")
    target = {"fingerprint": "f", "tokenizer_fingerprint": "t"}
    inputs = regenerate_inputs(config, source, target=target, digests=FileDigests(tmp_path))
    where = where_of(config, source, tmp_path, tiny_target_dir)
    made = []
    with target_for_all_files():
        for name in ("one", "two"):  # the second time from the answers on disk
            (tmp_path / name).mkdir()
            made.append(regenerate.write(tmp_path / name, **inputs, where=where))
    assert made[0]["digest"] == made[1]["digest"]
    assert (made[0]["num_answers"], made[0]["num_cached"], made[1]["num_cached"]) == (4, 0, 4)
    written = [json.loads(line) for line in (tmp_path / "one" / "a.jsonl").read_text().splitlines()]
    assert [row["id"] for row in written] == [0, 1, 2, 3]
    assert written[0]["regenerated_by"] == {
        "model": tiny_target_dir.name, "fingerprint": "f", "temperature": 0.0, "seed": 0, "max_tokens": 6,
    }  # fmt: skip
    shard = ingest.write(
        tmp_path,
        source_digest=made[0]["digest"],
        source_name="a.jsonl",
        tokenizer_fingerprint="t",
        rules={"mask_token_id": None},
        path=str(tmp_path / "one" / "a.jsonl"),
        data=to_dict(regenerated_data(config.data)),
        target_directory=str(tiny_target_dir),
        trust_remote_code=False,
    )
    assert shard["num_rows"] == 4 and shard["num_samples"] + shard["num_rejected"] == 4
    assert isinstance(regenerated_data(DataConfig(columns={"prompt": "x"})), DataConfig)


def test_what_the_key_of_a_file_holds(tmp_path: Path, tiny_target_dir: Path) -> None:
    """Other sampling, other answers; the size of batches and retries change none."""
    from tasks.ingest import Source
    from tasks.regenerate import regenerate, regenerate_inputs, where_of
    from tasks.storage.file_digests import FileDigests

    def key(target: str = "f", **settings: Any) -> str:
        values = {"target": {"name": str(tiny_target_dir)}, "regenerate": {"enabled": True, **settings}}
        config = from_dict(RunConfig, values)
        source = Source(str(tmp_path / "a.jsonl"), "digest")
        known = {"fingerprint": target, "tokenizer_fingerprint": "t"}
        inputs = regenerate_inputs(config, source, target=known, digests=FileDigests(tmp_path))
        where = where_of(config, source, tmp_path, tiny_target_dir)
        return regenerate.key({**inputs, "where": where})

    assert key() == key(batch_size=1, concurrency=1, max_retries=0, timeout_seconds=1.0)
    endpoint = {"base_url": "http://a/v1"}
    assert key(**endpoint) == key(target="other", **endpoint)
    keys = [key(), key(target="other"), key(seed=1), key(temperature=0.5), key(max_new_tokens=9)]
    keys += [
        key(cut_turns="closed"),
        key(**endpoint),
        key(**endpoint, model="m"),
        key(base_url="http://b/v1"),
    ]
    assert len(set(keys)) == len(keys)
