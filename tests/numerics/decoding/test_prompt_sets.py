"""Prompts of an evaluation: all turns of a prompt file's rows, and the start of validation samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support.tiny_target import MASK_TOKEN_ID
from dflash_core.config import DataConfig, DrafterConfig
from dflash_core.decoding.evaluation_inputs import EvaluationInputs
from dflash_core.decoding.evaluation_run import decode_all
from dflash_core.decoding.prompt_sets import PromptSets, validation_prompts
from dflash_core.decoding.sampling import Sampling
from dflash_core.decoding.speculate import Prompt, plain_decode
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.shape import drafter_shape
from dflash_core.errors import UserError
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target

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


def write_sets(
    directory: Path, target_dir: Path, **sets: list[dict[str, Any]]
) -> tuple[list[str], EvaluationInputs]:
    for name, rows in sets.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(sets), EvaluationInputs(
        target_directory=str(target_dir),
        drafter_directory="",
        prompt_paths=tuple(str(directory / f"{name}.jsonl") for name in sets),
    )


def test_a_second_turn_follows_the_targets_own_first_answer(
    tmp_path: Path, tiny_target_dir: Path, target: Target
) -> None:
    shape = drafter_shape(
        read_shape(target.config),
        DrafterConfig(num_layers=1, block_size=4, mask_token_id=MASK_TOKEN_ID),
        target.layer_ids,
    )
    names, inputs = write_sets(tmp_path, tiny_target_dir, code=CODE, chat=CHAT)
    sets = PromptSets(names, 10, inputs)
    evaluation, num_without_room = decode_all(target, DFlashDrafter(shape), sets, SAMPLING)
    assert num_without_room == 0
    asked = [sets.tokenizer.decode(p.token_ids) for p in evaluation.prompts]
    one = "<|im_start|>user\nWrite the function that sums.<|im_end|>\n<|im_start|>assistant\n"
    assert asked[:3] == [
        one,
        "<|im_start|>user\nclass Point<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWhat is None?<|im_end|>\n<|im_start|>assistant\n",
    ]
    first = plain_decode(target, [Prompt(token_ids=evaluation.prompts[0].token_ids)], SAMPLING).generations[0]
    answer = sets.tokenizer.decode(first.token_ids, skip_special_tokens=True)
    second_turn = "<|im_end|>\n<|im_start|>user\nNow with a loop.<|im_end|>\n<|im_start|>assistant\n"
    assert asked[3:] == [f"{one}{answer}{second_turn}"]
    report = evaluation.report()
    assert report["lossless"] is True
    assert report["prompts"] == 4
    assert {name: s["prompts"] for name, s in report["sets"].items()} == {"code": 3, "chat": 1}
    by_category = {name: s["prompts"] for name, s in report["categories"].items()}
    assert by_category == {"code/sums": 2, "code/points": 1}
    assert [r["prompt_set"] for r in evaluation.records()] == ["code", "code", "chat", "code"]


def test_prompts_per_set_are_limited_and_a_bad_row_is_named(tmp_path: Path, tiny_target_dir: Path) -> None:
    names, inputs = write_sets(tmp_path, tiny_target_dir, code=CODE, chat=CHAT)
    assert len(PromptSets(names, 1, inputs).first()[1]) == 2
    many = [{"question": f"{i}?"} for i in range(8)]
    names, inputs = write_sets(tmp_path, tiny_target_dir, many=many)
    assert [row.opening[0]["content"] for _, row in PromptSets(names, 3, inputs).rows] == ["0?", "2?", "5?"]
    names, inputs = write_sets(tmp_path, tiny_target_dir, bad=[{"turns": []}])
    with pytest.raises(UserError, match=r"evaluation.prompts: .*bad.jsonl line 1: no prompt in turns: \[\]"):
        PromptSets(names, 10, inputs)


def test_template_arguments_reach_every_turn(tmp_path: Path, tiny_target_dir: Path) -> None:
    template = tmp_path / "thinks.jinja"
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template.write_text(
        turns + "{% if add_generation_prompt %}assistant:{{ '' if enable_thinking else ' done' }}{% endif %}"
    )
    names, inputs = write_sets(tmp_path, tiny_target_dir, code=CODE[:1])

    def asked(thinking: bool) -> list[str]:
        arguments = {"enable_thinking": thinking}
        data = DataConfig(chat_template=str(template), template_arguments=arguments)
        sets = PromptSets(names, 1, replace(inputs, data=data))
        [first], [second] = sets.first()[1], sets.following({0: ["an answer"]})[1]
        return [sets.tokenizer.decode(prompt.token_ids) for prompt in (first, second)]

    on, off = asked(True), asked(False)
    assert on[0].endswith("assistant:")
    assert on[1].endswith("assistant: an answer\nuser: Now with a loop.\nassistant:")
    assert off == [f"{prompt} done" for prompt in on]


class Samples:
    """A store of four samples: loss masks by row, token 10 * row + position."""

    masks = [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]

    def loss_mask(self, row: int) -> np.ndarray:
        return np.array(self.masks[row], dtype=np.uint8)

    def token_ids(self, row: int) -> np.ndarray:
        return 10 * row + np.arange(4)


@pytest.mark.parametrize(
    "min_supervised_tokens, limit, expected",
    [
        # Row 1 has no answer, row 3 nothing before it.
        (1, 9, [(20,), (0, 1)]),
        # Row 2 has one supervised token, so nothing to draft.
        (2, 9, [(0, 1)]),
        (1, 1, [(20,)]),
    ],
)
def test_validation_prompts_end_before_the_first_answer(
    min_supervised_tokens: int, limit: int, expected: list[tuple[int, ...]]
) -> None:
    prompts = validation_prompts(Samples(), [3, 2, 1, 0], limit, min_supervised_tokens=min_supervised_tokens)
    assert prompts == [Prompt(token_ids=ids, prompt_set="validation") for ids in expected]
