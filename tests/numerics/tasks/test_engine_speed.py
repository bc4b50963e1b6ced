"""Speeds of a serving engine in an evaluation: what it is asked, and what is made of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.target.target import Target
from tasks import engine_speed
from tasks.reporting import evaluation_tables
from tests.support.engine_answers import engine_answer
from tests.support.evaluation_jobs import evaluation_job


def test_the_engine_is_measured_one_at_a_time_and_in_batches(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def run_engine(
        python: Path, request: dict[str, Any], directory: Path, name: str, *, field: str
    ) -> dict[str, Any]:
        asked[name] = request
        emitted, seconds = ([[1, 2, 2]], 1.0) if request["drafter"] else ([[1] * 5], 2.0)
        answers = [[7, 8, 9, 10, 11] for _ in request["prompts"]]
        return engine_answer(emitted, 2, [2, 0, 0], token_ids=answers) | {"seconds": seconds, "version": "1"}

    monkeypatch.setattr(engine_speed, "run_engine", run_engine)
    target = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="float32")
    job = evaluation_job(tmp_path, tiny_target_dir, target, batch_size=4, num_single_prompts=1, engine="vllm")
    figures = engine_speed.engine_speeds(job, tmp_path)
    json.dumps(figures)
    names = ["one_at_a_time-plain", "one_at_a_time-speculative", "batched-plain", "batched-speculative"]
    assert list(asked) == names
    assert [request["max_num_seqs"] for request in asked.values()] == [1, 1, 4, 4]
    assert [len(request["prompts"]) for request in asked.values()] == [1, 1, 2, 2]
    assert [request["drafter"] is None for request in asked.values()] == [True, False, True, False]
    assert figures["one_at_a_time"]["plain_tokens_per_second"] == 2.5
    assert figures["one_at_a_time"]["speedup"] == 2.0
    assert figures["batched"]["lossless"] is True
    assert figures["batched"]["acceptance_length"] == 2.0
    text = evaluation_tables.headline({"engine": figures, "acceptance_by_position": [1.0]})
    assert text.startswith(
        "one prompt at a time in vLLM 1: plain 2.5 tokens/s, speculative 5.0 tokens/s: 2.00 times"
    )
