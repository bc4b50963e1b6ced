"""Embedding and lm_head of families with scales, caps and biases, compared with transformers alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.target_families import VOCABULARY, make_family
from dflash_core.config import ObjectiveConfig
from dflash_core.drafter.initial_weights import empty_model
from dflash_core.errors import UserError
from dflash_core.target.capture import TargetCapture
from dflash_core.target.head import Head, embedding_table, embedding_with, read_head
from dflash_core.target.target import Target

LENGTH = 12


NAMES = ("llama", "granite", "cohere", "gemma", "gemma2 without cap", "gemma3", "phi moe")


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_family(tmp_path_factory.mktemp(request.param) / "target", request.param)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCABULARY, size=LENGTH)


def own_logits(directory: Path) -> torch.Tensor:
    """Return the logits [T, V] of the model alone, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.as_tensor(tokens())[None]).logits[0]


def test_logits_and_labels_are_the_models_own(family: tuple[str, Path]) -> None:
    name, directory = family
    target = Target.load(directory, layer_ids=[1], compute_dtype="float32")
    bounds = np.array([0, LENGTH], dtype=np.int32)
    last = target.capture(tokens(), bounds, want_last_hidden=True).last_hidden
    assert last is not None
    expected = own_logits(directory)
    torch.testing.assert_close(target.logits(last), expected, rtol=1e-4, atol=1e-4)
    capture = TargetCapture(target, ObjectiveConfig(labels="target"))
    labels = capture.run(tokens(), np.ones(LENGTH, dtype=np.uint8), bounds, 0).labels
    assert labels is not None
    assert labels[1:].tolist() == expected[:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "scale", "cap", "has_bias"),
    [
        ("llama", 1.0, None, False),
        ("granite", 1 / 8, None, False),
        ("cohere", 0.0625, None, False),
        ("gemma2 without cap", 1.0, 30.0, False),
        ("phi moe", 1.0, None, True),
    ],
)
def test_the_rule_is_found(
    name: str, scale: float, cap: float | None, has_bias: bool, tmp_path: Path
) -> None:
    head = Target.load(make_family(tmp_path, name), layer_ids=[1], compute_dtype="float32").head
    assert (head.scale, head.cap, head.bias_V is not None) == (scale, cap, has_bias)
    head = Target.load(tmp_path, layer_ids=[1], compute_dtype="bfloat16").head
    assert (head.scale, head.cap, head.bias_V is not None) == (scale, cap, has_bias)


def test_embeddings_are_those_of_the_models_module(family: tuple[str, Path]) -> None:
    name, directory = family
    target = Target.load(directory, layer_ids=[1], compute_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model.get_input_embeddings()(torch.arange(VOCABULARY))
    assert torch.equal(target.embed_weight, expected)
    # sqrt(64) in Gemma's; Granite scales in the model, outside the module, where engines do too
    factor = 8.0 if name.startswith("gemma") else 1.0
    stored = model.get_input_embeddings().weight.detach()
    assert torch.equal(expected, stored * factor)
    empty = empty_model(AutoConfig.from_pretrained(directory), trust_remote_code=False)
    filled = embedding_with(empty.get_input_embeddings(), stored)
    assert torch.equal(embedding_table(filled), expected)


def test_a_head_of_another_form_is_rejected(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_family(tmp_path, "llama"), dtype=torch.float32)
    forward = model.forward

    def squared(**kwargs: object) -> object:
        output = forward(**kwargs)
        output.logits = output.logits**2
        return output

    model.forward = squared
    with pytest.raises(UserError, match="target.name: logits of llama are no scaled and capped product"):
        read_head(model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "term"), [("gemma2 without cap", "a soft cap of 30"), ("phi moe", "a bias")]
)
def test_kl_is_rejected_where_the_loss_does_not_know_the_rule(name: str, term: str, tmp_path: Path) -> None:
    target = Target.load(make_family(tmp_path, name), layer_ids=[1], compute_dtype="float32")
    with pytest.raises(
        UserError, match=f"objective.loss: 'kl' .* lm_head has {term}; allowed: cross_entropy"
    ):
        TargetCapture(target, ObjectiveConfig(loss="kl"))


def test_kl_compares_with_the_models_own_distribution(tmp_path: Path) -> None:
    """The loss applies lm_head's weight alone to the captured state, which therefore carries the scale."""
    directory = make_family(tmp_path, "granite")
    target = Target.load(directory, layer_ids=[1], compute_dtype="float32")
    capture = TargetCapture(target, ObjectiveConfig(loss="kl"))
    bounds = np.array([0, LENGTH], dtype=np.int32)
    last = capture.run(tokens(), np.ones(LENGTH, dtype=np.uint8), bounds, 0).last_hidden
    assert last is not None
    torch.testing.assert_close(last @ target.head_weight.T, own_logits(directory), rtol=1e-4, atol=1e-4)


def test_scale_bias_and_cap_by_hand() -> None:
    head = Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, -1.0]), scale=0.5, cap=4.0)
    # W h = [3, 8], with the bias [4, 7], scaled [2, 3.5], capped 4 tanh([0.5, 0.875])
    expected = 4 * torch.tanh(torch.tensor([[0.5, 0.875]]))
    torch.testing.assert_close(head.logits(torch.tensor([[3.0, 4.0]])), expected)
    assert head.raw(torch.tensor([[3.0, 4.0]])).tolist() == [[3.0, 8.0]]
