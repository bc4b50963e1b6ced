"""One evaluation as a whole: both speeds, several ranks, later turns without room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.decoding.acceptance import find_divergences
from dflash_core.decoding.evaluate import evaluate
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
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS, make_drafter
from tests.support.evaluation_jobs import evaluation_job

BATCHED = Sampling(max_new_tokens=6, batch_size=2)


class Recorded(Exception):
    """The part of one rank is known."""


class RecordingShare(Share):
    """A rank that hands its results to `boxes`, and gets those of all ranks once all are there."""

    boxes: dict[int, dict[int, Any]]

    def merge(self, mine: dict[int, Any]) -> list[Any]:
        self.boxes[self.rank] = mine
        if len(self.boxes) < self.size:
            raise Recorded
        everyone = {number: value for box in self.boxes.values() for number, value in box.items()}
        return [everyone[number] for number in sorted(everyone)]


def test_the_ranks_together_give_what_one_rank_gives(target: Target, drafter: DFlashDrafter) -> None:
    """Three batches on four ranks: the last has none."""
    alone = evaluate(target, drafter, PROMPTS, BATCHED)
    RecordingShare.boxes = {}
    for rank in range(3):
        with pytest.raises(Recorded):
            evaluate(target, drafter, PROMPTS, BATCHED, share=RecordingShare(rank, 4))
    result = evaluate(target, drafter, PROMPTS, BATCHED, share=RecordingShare(3, 4))
    assert [list(box) for box in RecordingShare.boxes.values()] == [[0], [1], [2], []]
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


def test_later_turns_without_room_are_counted(
    tmp_path: Path, tiny_target_dir: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = evaluation_job(tmp_path, tiny_target_dir, target)
    sets = PromptSets(["chat"], 9, job.inputs)
    longest = max(len(prompt.token_ids) for prompt in sets.first()[1])
    monkeypatch.setattr(target.config, "max_position_embeddings", longest + BATCHED.max_new_tokens)
    done, num_without_room = decode_all(target, make_drafter(target), sets, BATCHED)
    assert num_without_room == 1
    assert len(done.prompts) == 2


@pytest.mark.long
def test_two_ranks_give_the_result_of_one(
    tmp_path: Path, tiny_target_dir: Path, target: Target, capfd: pytest.CaptureFixture[str]
) -> None:
    from tasks.evaluate import run_job

    job = evaluation_job(tmp_path, tiny_target_dir, target, batch_size=1)
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
