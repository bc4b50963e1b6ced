"""One tiny checkpoint per kind of target: captured states and decoding compared with transformers alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.support.target_families import VOCABULARY, make_family
from dflash_core.errors import UserError
from dflash_core.target.decode_cache import DecodeCache
from dflash_core.target.load import auto_class
from dflash_core.target.target import Target

# Each way in which packed families differ from plain grouped attention.
PACKED_NAMES = (
    "llama",
    "llama3",
    "qwen3 yarn",
    "mixtral",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "gemma4",
    "granite",
    "glm4",
    "deepseek v3",
    "nemotron",
    "stablelm",
    "gpt-neox",
)
# What our attention rejects at its first call: family -> part of the message.
REJECTED = {
    "doge": "a mask of its own is not supported",
    "diffllama": "calls attention twice",
    "xglm": "do not call",
    "gpt2": "has no list of layers",
}
BOUNDS = np.array([0, 1, 20, 31, 60], dtype=np.int32)
LAYERS = [0, 2, 3]


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCABULARY, size=int(BOUNDS[-1]))


def alone(directory: Path) -> torch.Tensor:
    """Return the outputs of the captured layers [T, L * D], by eager attention, each sample alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    states: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: object) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output)[0])

    for layer in LAYERS:
        model.get_decoder().layers[layer].register_forward_hook(keep)
    for start, end in zip(BOUNDS, BOUNDS[1:]):
        kept.clear()
        with torch.inference_mode():
            model(torch.as_tensor(tokens()[None, start:end]), use_cache=False)
        states.append(torch.cat(kept, dim=-1))
    return torch.cat(states)


@pytest.mark.parametrize("name", PACKED_NAMES)
def test_a_family_computes_as_transformers_does(name: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, name)
    target = Target.load(directory, layer_ids=LAYERS, compute_dtype="float32")
    expected = alone(directory)
    largest = float(expected.abs().max())
    packed = target.capture(tokens(), BOUNDS).hidden
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5 * largest)
    padded = target.capture(tokens(), BOUNDS, 40).hidden
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-5 * largest)
    # The last sample: a prompt of 20 tokens, four drafts of which all but one are rejected, then the truth.
    cache = DecodeCache(num_rows=1, num_slots=40)
    sample, states = torch.as_tensor(tokens()[31:60]), expected[31:60]
    target.prefill(sample[:20], torch.tensor([0, 20], dtype=torch.int32), cache)
    drafts = torch.tensor([[int(sample[20]), 5, 6, 7]])
    _, features = target.decode(drafts, cache, torch.arange(20, 24)[None])
    torch.testing.assert_close(features[0, 0], states[20], rtol=0, atol=1e-5 * largest)
    _, features = target.decode(sample[None, 21:25], cache, torch.arange(21, 25)[None])
    torch.testing.assert_close(features[0], states[21:25], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", REJECTED)
def test_what_our_attention_does_not_compute_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path, name)
    with pytest.raises(UserError, match=f"^target.name: .*{REJECTED[name]}"):
        Target.load(directory, layer_ids=LAYERS, compute_dtype="float32").capture(tokens(), BOUNDS)


def test_a_checkpoint_without_some_tensors_is_rejected(tmp_path: Path) -> None:
    path = make_family(tmp_path, "llama") / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.3.mlp.down_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"holds no tensor model.layers.3.mlp.down_proj.weight \(1 are missing"
    ):
        Target.load(tmp_path, layer_ids=LAYERS, compute_dtype="float32")


def test_a_model_with_an_image_encoder_is_used_as_a_language_model(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Mistral3Config, MistralConfig, PixtralVisionConfig

    text = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    vision = PixtralVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Mistral3Config(text_config=text, vision_config=vision)
    assert auto_class(config) is AutoModelForImageTextToText
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, layer_ids=[1], compute_dtype="float32")
    bounds = np.array([0, 9], dtype=np.int32)
    last = target.capture(tokens()[:9], bounds, want_last_hidden=True).last_hidden
    assert last is not None
    with torch.inference_mode():
        expected = model(input_ids=torch.as_tensor(tokens()[None, :9]), use_cache=False).logits[0]
    torch.testing.assert_close(target.logits(last), expected, rtol=1e-4, atol=1e-5)


def test_a_type_without_a_language_model_is_rejected(tmp_path: Path) -> None:
    from transformers import ViTConfig

    with pytest.raises(UserError, match="no language model for the type 'vit'; allowed: causal"):
        auto_class(ViTConfig())
