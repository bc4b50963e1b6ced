"""Decoding steps without the model's own modules, against the model's own forward over the same cache."""

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from benchmarks.support.target_families import VOCABULARY, make_family
from dflash_core.target.few_tokens import is_plain
from dflash_core.target.packed_linear import packs
from dflash_core.target.target import Target

# Sliding windows, biases, norms of queries and keys, scaled rotary embeddings.
PLAIN = ("llama", "llama3", "mistral", "qwen2", "qwen3", "qwen3 yarn")
OTHER = ("gemma3", "granite", "cohere", "mixtral", "nemotron")


def decoded(target: Target, starts: list[int], num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and features of new tokens of rows with prompts of 9 and 20 tokens, from `starts` on."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (29,), generator=generator)
    tokens = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
    cache = target.new_cache(2, 40)
    target.prefill(prompts, torch.tensor([0, 9, 29]), cache)
    states, features = [], []
    for first in range(0, 8, num_new):
        positions = torch.tensor(starts)[:, None] + torch.arange(first, first + num_new)
        hidden, captured = target.decode(tokens[:, first : first + num_new], cache, positions)
        states.append(hidden)
        features.append(captured)
    return torch.cat(states, dim=1), torch.cat(features, dim=1)


@pytest.mark.parametrize("name", PLAIN)
def test_a_step_is_what_the_models_own_forward_computes(name: str, tmp_path: Path) -> None:
    make_family(tmp_path, name)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 0.1)):
        ours, own = (Target.load(tmp_path, layer_ids=[0, 3], compute_dtype=dtype) for _ in range(2))
        own.__dict__["_few_tokens"] = None
        assert ours._few_tokens is not None
        for num_new in (1, 4):
            actual, expected = decoded(ours, [9, 17], num_new), decoded(own, [9, 17], num_new)
            for a, b in zip(actual, expected):
                assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("name", OTHER)
def test_other_families_decode_by_their_own_forward(name: str, tmp_path: Path) -> None:
    target = Target.load(make_family(tmp_path, name), layer_ids=[0], compute_dtype="float32")
    assert target._few_tokens is None


def test_a_model_that_was_changed_decodes_by_its_own_forward(tiny_target_dir: Path) -> None:
    def changed(change: Any) -> bool:
        target = Target.load(tiny_target_dir, layer_ids=[0], compute_dtype="float32")
        layer = target.layers[1]
        change(layer, target.config)
        return not is_plain(target.model, target.decoder)

    class Quantised(torch.nn.Linear):
        """A product that computes otherwise."""

    assert not changed(lambda layer, config: None)
    assert changed(lambda layer, config: setattr(layer.self_attn, "q_proj", Quantised(64, 64)))
    assert changed(lambda layer, config: setattr(config, "hidden_act", "gelu"))
    assert changed(lambda layer, config: layer.mlp.register_forward_hook(lambda *args: None))
    assert changed(lambda layer, config: setattr(layer, "forward", MethodType(lambda *args: None, layer)))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not packs(torch.bfloat16),
    reason="the order of the sums is known for packed weights on AVX512",
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_how_many_tokens_are_read_together(
    name: str, dtype: str, tmp_path: Path
) -> None:
    target = Target.load(make_family(tmp_path, name), layer_ids=[0, 3], compute_dtype=dtype)
    single = decoded(target, [9, 20], 1)
    for num_new in (2, 4, 8):
        several = decoded(target, [9, 20], num_new)
        assert torch.equal(several[0], single[0])
        assert torch.equal(several[1], single[1])
        assert torch.equal(target.logits(several[0]), target.logits(single[0]))
    one_by_one = torch.cat([target.logits(single[0][:1, i : i + 1]) for i in range(8)], dim=1)
    assert torch.equal(one_by_one, target.logits(single[0])[:1])
