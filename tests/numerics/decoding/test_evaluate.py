"""Evaluation: both decoders on the same prompts, their report and records, and all turns of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.decoding.evaluate import difference_from_model, evaluate
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS, KnowingContext, make_drafter


def test_bfloat16_differs_at_near_ties_alone(tiny_target_dir: Path) -> None:
    narrow = Target.load(tiny_target_dir, layer_ids=[0, 2], compute_dtype="bfloat16")
    narrow.eos_ids = ()
    evaluation = evaluate(narrow, make_drafter(narrow), PROMPTS, Sampling(max_new_tokens=24, batch_size=5))
    report = evaluation.report()
    assert report["lossless"] is True
    assert report["prompts_equal"] + report["near_ties"] == 5
    assert report["compute_dtype"] == "bfloat16"


def test_prompts_that_cannot_be_decoded_are_rejected(target: Target, drafter: DFlashDrafter) -> None:
    for wrong in ([], [Prompt(token_ids=())]):
        with pytest.raises(UserError, match="evaluation.prompts"):
            evaluate(target, drafter, wrong, Sampling(max_new_tokens=2))
    with pytest.raises(
        UserError, match="evaluation.max_new_tokens: 2048 after a prompt of 14 tokens.*2048 positions"
    ):
        evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=2048))


def test_the_report_holds_sets_and_one_record_per_prompt(
    target: Target, drafter: DFlashDrafter, knowing: type[KnowingContext]
) -> None:
    knowing.right = 1
    # The warm-up decodes the first prompt, then set a by length, then set b.
    knowing.order = [0, 4, 0, 2, 1, 3]
    evaluation = evaluate(target, drafter, PROMPTS, Sampling(max_new_tokens=9, batch_size=5))
    report = evaluation.report()
    assert report["acceptance_length"] == 2.0  # 8 tokens in 4 steps for each prompt
    assert report["acceptance_interval"] == [2.0, 2.0]
    assert report["steps"] == 20
    assert report["accepted_by_position"] == [20, 0, 0]
    assert report["drafted_by_position"] == [20, 15, 15]
    assert {name: figures["prompts"] for name, figures in report["sets"].items()} == {"a": 3, "b": 2}
    assert report["lossless"] is True
    records = evaluation.records()
    assert [r["prompt_tokens"] for r in records] == [9, 3, 14, 6, 1]
    assert records[0]["token_ids"] == knowing.answers[0][:9]
    assert records[0]["emitted"] == [2, 2, 2, 2]


def test_answers_are_compared_with_the_model_alone(target: Target, drafter: DFlashDrafter) -> None:
    """A fault that both decoders share shows as the first token that the model would not have written."""
    prompt, sampling = Prompt(token_ids=(5, 9, 31)), Sampling(max_new_tokens=6)
    evaluation = evaluate(target, drafter, [prompt], sampling)
    assert evaluation.model_divergence is None
    assert evaluation.lossless is True
    answer = list(evaluation.plain.generations[0].token_ids)
    answer[2] = answer[2] + 1 if answer[2] < 500 else 0
    found = difference_from_model(target, 7, prompt, answer)
    assert found is not None
    assert (found.prompt, found.position) == (7, 2)
    evaluation.model_divergence = found
    assert evaluation.lossless is False
    assert evaluation.report()["first_difference_from_model"]["position"] == 2


def test_a_head_that_computes_otherwise_is_not_lossless(
    target: Target, drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "logits", lambda hidden: -target.head.logits(hidden))
    evaluation = evaluate(target, drafter, [Prompt(token_ids=(5, 9, 31))], Sampling(max_new_tokens=4))
    assert not evaluation.divergences
    assert evaluation.lossless is False
