"""One evaluation as a whole: both speeds, several ranks, later turns without room."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.config import EvaluationConfig
from dflash_core.decoding.acceptance import find_divergences
from dflash_core.decoding.evaluate import Evaluation, evaluate
from dflash_core.decoding.evaluation_inputs import EvaluationInputs, EvaluationJob
from dflash_core.decoding.evaluation_run import (
    decode_all,
    decode_singly,
    full_records,
    full_report,
    run_evaluation,
)
from dflash_core.decoding.prompt_sets import PromptSets
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.shares import Share
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import save_drafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS, make_drafter

BATCHED = Sampling(max_new_tokens=6, batch_size=2)


class ThreadShare(Share):
    """The share of a thread that stands in for a rank."""

    boxes: dict[int, dict[int, Any]]
    barrier: threading.Barrier

    def merge(self, mine: dict[int, Any]) -> list[Any]:
        self.boxes[self.rank] = mine
        self.barrier.wait(60)
        everyone = {number: value for box in self.boxes.values() for number, value in box.items()}
        return [everyone[number] for number in sorted(everyone)]


def on_threads(target: Target, drafter: DFlashDrafter, size: int) -> list[Evaluation]:
    ThreadShare.boxes, ThreadShare.barrier = {}, threading.Barrier(size)
    results: dict[int, Evaluation] = {}

    def run(rank: int) -> None:
        results[rank] = evaluate(target, drafter, PROMPTS, BATCHED, share=ThreadShare(rank, size))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def test_every_rank_gets_what_one_rank_measures(target: Target, drafter: DFlashDrafter) -> None:
    """Three batches on four ranks: one of them has none."""
    alone = evaluate(target, drafter, PROMPTS, BATCHED)
    for result in on_threads(target, drafter, 4):
        assert result.records() == alone.records()
        assert [timing.prompts for timing in result.timings] == [(4, 0), (2,), (1, 3)]
        assert result.lossless is True


def test_both_speeds_are_reported_by_set_and_checked(target: Target, drafter: DFlashDrafter) -> None:
    done = evaluate(target, drafter, PROMPTS, BATCHED)
    single = decode_singly(target, drafter, done, 2)
    # Set a is 0, 2, 4, set b is 1, 3.
    assert single.numbers == [0, 2, 1, 3]
    report = full_report(done, single)
    assert report["one_at_a_time"]["prompts"] == 4
    assert report["one_at_a_time"]["batch_size"] == 1
    assert report["one_at_a_time"]["lossless"] is True
    assert report["one_at_a_time"]["speedup_interval"] is not None
    assert report["batched"]["prompts"] == 5
    assert report["batched"]["batch_size"] == 2
    assert report["batched"]["lossless"] is True
    assert report["sets"]["b"]["one_at_a_time"]["plain_tokens"] == 12
    assert report["sets"]["a"]["batched"]["plain_tokens"] == 18
    assert "speedup" not in report
    assert report["protocol"]["batch_size"] == 2
    records = full_records(done, single)
    assert [len(record.get("one_at_a_time", [])) for record in records] == [4, 4, 4, 4, 0]
    assert records[2]["one_at_a_time"][0] == 6


def test_a_fault_in_either_pass_is_not_lossless(target: Target, drafter: DFlashDrafter) -> None:
    done = evaluate(target, drafter, PROMPTS, BATCHED)
    single = decode_singly(target, drafter, done, 1)
    wrong = single.evaluation.speculative.generations[0]
    wrong.token_ids[1] += 1
    plain, speculative = single.evaluation.plain, single.evaluation.speculative
    single.evaluation.divergences = find_divergences(plain.generations, speculative.generations)
    report = full_report(done, single)
    assert report["lossless"] is False
    assert report["batched"]["lossless"] is True


def test_batches_of_one_are_decoded_once(target: Target, drafter: DFlashDrafter) -> None:
    sampling = replace(BATCHED, batch_size=1, temperature=1.0)
    done = evaluate(target, drafter, PROMPTS, sampling)
    single = decode_singly(target, drafter, done, 1)
    report = full_report(done, single)
    assert single.evaluation is done
    assert report["one_at_a_time"]["prompts"] == 5
    assert report["batched"] is None
    assert report["sets"]["a"]["batched"] is None
    # Sampled output is compared with nothing.
    assert report["lossless"] is None
    assert report["protocol"]["temperature"] == 1.0


def test_sampled_answers_are_the_same_in_batches_and_alone(target: Target, drafter: DFlashDrafter) -> None:
    done = evaluate(target, drafter, PROMPTS, replace(BATCHED, temperature=1.0))
    single = decode_singly(target, drafter, done, 2)
    for number, answer in zip(single.numbers, single.evaluation.plain.generations):
        assert answer.token_ids == done.plain.generations[number].token_ids


def job_of(directory: Path, target_dir: Path, target: Target, **settings: Any) -> EvaluationJob:
    """Return an evaluation of two rows, one with two turns, and of a random drafter."""
    rows = '{"prompt": ["What is a list?", "And a tuple?"]}\n{"problem": "What is 2 + 2?"}\n'
    (directory / "chat.jsonl").write_text(rows)
    torch.manual_seed(0)
    save_drafter(make_drafter(target), directory / "drafter")
    return EvaluationJob(
        inputs=EvaluationInputs(
            target_directory=str(target_dir),
            drafter_directory=str(directory / "drafter"),
            prompt_paths=(str(directory / "chat.jsonl"),),
            device="cpu",
        ),
        set_names=("chat",),
        settings=EvaluationConfig(max_new_tokens=6, **settings),
    )


def test_later_turns_without_room_are_counted(tmp_path: Path, tiny_target_dir: Path, target: Target) -> None:
    job = job_of(tmp_path, tiny_target_dir, target)
    sets = PromptSets(["chat"], 9, job.inputs)
    longest = max(len(prompt.token_ids) for prompt in sets.first()[1])
    small = replace(BATCHED, max_new_tokens=target.config.max_position_embeddings - longest)
    _, num_without_room = decode_all(target, make_drafter(target), sets, small)
    assert num_without_room == 1


@pytest.mark.long
def test_two_ranks_give_the_result_of_one(
    tmp_path: Path, tiny_target_dir: Path, target: Target, capfd: pytest.CaptureFixture[str]
) -> None:
    from tasks.evaluate import run_job

    job = job_of(tmp_path, tiny_target_dir, target, batch_size=1)
    alone = run_evaluation(job)
    assert alone["report"]["prompts"] == 3
    assert alone["report"]["protocol"]["ranks"] == 1
    both = run_job(replace(job, inputs=replace(job.inputs, num_ranks=2)))
    for result in (alone, both):
        for record in result["records"]:
            del record["one_at_a_time"]
    assert both["records"] == alone["records"]
    assert both["report"]["acceptance_interval"] == alone["report"]["acceptance_interval"]
    assert both["report"]["protocol"]["ranks"] == 2
    assert "turn 2: 1/1 prompts of rank 0 of 2, acceptance length" in capfd.readouterr().out
    # A user's mistake on a rank.
    (tmp_path / "chat.jsonl").write_text('{"turns": 3}\n')
    with pytest.raises(UserError, match="evaluation.prompts: .*chat.jsonl line 1"):
        run_job(replace(job, inputs=replace(job.inputs, num_ranks=2)))
