"""Decoding during training ends answers where an evaluation ends them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import RunConfig
from dflash_core.decoding.during_training import decoder_of, end_answers
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import plain_decode, speculative_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.target.target import Target
from tests.support.decoding_cases import PROMPTS


def test_answers_end_at_the_end_of_turn_of_the_template(
    tiny_target_dir: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "eos_ids", (9,))
    monkeypatch.setattr(target, "added_eos_ids", ())
    end_answers(target, tiny_target_dir, RunConfig())
    assert (target.eos_ids, target.added_eos_ids) == ((2, 9), (2,))


def test_without_a_tokenizer_the_ends_of_the_configs_remain(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "eos_ids", (9,))
    end_answers(target, tmp_path, RunConfig())
    assert target.eos_ids == (9,)
    assert "decoding during training: answers end at (9,) alone: " in capsys.readouterr().out


def test_both_decoders_stop_at_an_added_end(
    target: Target, drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is the sixth token of an answer of the target."""
    sampling = Sampling(max_new_tokens=24, batch_size=5)
    free = plain_decode(target, PROMPTS, sampling).generations
    monkeypatch.setattr(target, "eos_ids", (9, free[0].token_ids[5]))
    plain = plain_decode(target, PROMPTS, sampling).generations
    speculative = speculative_decode(target, drafter, PROMPTS, sampling).generations
    assert plain[0].finished == "end"
    assert len(plain[0].token_ids) <= 6
    assert [g.token_ids for g in speculative] == [g.token_ids for g in plain]
    assert [g.finished for g in speculative] == [g.finished for g in plain]


def test_nothing_is_decoded_once_the_run_is_to_stop(target: Target, drafter: DFlashDrafter) -> None:
    assert decoder_of(target, PROMPTS, lambda: True)(drafter) == {}
    decoded = decoder_of(target, PROMPTS, lambda: False)(drafter)
    assert decoded["validation/acceptance_length"] >= 1.0
