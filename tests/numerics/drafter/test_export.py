"""The exported drafter: the keys and tensor names that servers read, and nothing guessed on the way back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import load_drafter, save_drafter
from dflash_core.drafter.shape import DrafterShape
from dflash_core.errors import UserError

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    mask_token_id=3,
    target_layer_ids=(1, 2, 5),
    num_target_layers=8,
    vocab_size=512,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    save_drafter(DFlashDrafter(SHAPE, torch.Generator().manual_seed(5)), tmp_path / "drafter")
    return tmp_path / "drafter"


def outputs(drafter: DFlashDrafter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 3 * 32, generator=generator).to(dtype)
    embeds = torch.randn(2, 8, 32, generator=generator).to(dtype)
    context = drafter.project_layers(drafter.project_context(features), torch.arange(20))
    where = {"context_start_A": torch.tensor([0, 0]).int(), "anchor_A": torch.tensor([7, 20]).int()}
    with torch.no_grad():
        return drafter.forward_blocks(embeds, context, **where)


def edit(directory: Path, change: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_config_holds_all_that_serving_reads(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 5], "block_size": 8},
        "num_target_layers": 8,
        "layer_types": ["full_attention", "full_attention"],
        "is_causal": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in expected} == expected


def test_transformers_reads_the_config_as_qwen3(exported: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(exported)
    assert type(config).__name__ == "Qwen3Config"
    assert config.dflash_config["target_layer_ids"] == [1, 2, 5]
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert config.is_causal is False


def test_tensor_names_are_the_published_ones(exported: Path) -> None:
    attention = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    weights = load_file(exported / "model.safetensors")
    assert set(weights) == expected
    assert weights["fc.weight"].shape == (32, 96)
    assert weights["layers.0.self_attn.k_proj.weight"].shape == (32, 32)


def test_outputs_are_bit_equal_after_a_reload(exported: Path) -> None:
    before = DFlashDrafter(SHAPE, torch.Generator().manual_seed(5))
    after = load_drafter(exported)
    assert after.shape == SHAPE
    assert torch.equal(outputs(before), outputs(after))
    assert torch.equal(outputs(before, torch.bfloat16), outputs(after, torch.bfloat16))


def test_bfloat16_weights_are_bit_equal_where_bfloat16_computes(tmp_path: Path) -> None:
    drafter = DFlashDrafter(SHAPE)
    save_drafter(drafter, tmp_path / "drafter", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_drafter(tmp_path / "drafter")
    assert all(parameter.dtype == torch.bfloat16 for parameter in again.parameters())
    linear_only = DFlashDrafter(SHAPE).to(torch.bfloat16)
    assert torch.equal(outputs(linear_only, torch.bfloat16), outputs(again, torch.bfloat16))


def test_a_sliding_window_survives(tmp_path: Path) -> None:
    save_drafter(DFlashDrafter(replace(SHAPE, sliding_window=12)), tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 12)
    assert load_drafter(tmp_path / "drafter").shape.sliding_window == 12


def test_saving_again_replaces_and_leaves_nothing_behind(exported: Path) -> None:
    other = DFlashDrafter(SHAPE, torch.Generator().manual_seed(6))
    save_drafter(other, exported)
    assert torch.equal(outputs(load_drafter(exported)), outputs(other))
    assert [p.name for p in exported.parent.iterdir()] == ["drafter"]
    assert sorted(p.name for p in exported.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_a_missing_key_of_dflash_config_is_rejected(exported: Path, key: str) -> None:
    edit(exported, lambda config: config["dflash_config"].pop(key))
    with pytest.raises(UserError, match=f"config.json: dflash_config.{key} is missing"):
        load_drafter(exported)


def test_a_missing_or_contradictory_block_size_is_rejected(exported: Path) -> None:
    edit(exported, lambda config: config["dflash_config"].pop("block_size"))
    # Published drafters have it at the top level alone.
    assert load_drafter(exported).shape.block_size == 8
    edit(exported, lambda config: config.update(dflash_config=config["dflash_config"] | {"block_size": 16}))
    with pytest.raises(UserError, match=r"block_size is \[8, 16\]"):
        load_drafter(exported)
    edit(exported, lambda config: (config.pop("block_size"), config["dflash_config"].pop("block_size")))
    with pytest.raises(UserError, match="block_size is missing"):
        load_drafter(exported)
    edit(exported, lambda config: config.update(block_size=10**9))
    with pytest.raises(UserError, match="block_size is 1000000000; allowed: 2 to 1024"):
        load_drafter(exported)


@pytest.mark.parametrize("key", ["head_dim", "num_target_layers", "rms_norm_eps", "vocab_size"])
def test_no_size_is_defaulted(exported: Path, key: str) -> None:
    edit(exported, lambda config: config.pop(key))
    with pytest.raises(UserError, match=f"{key} is missing"):
        load_drafter(exported)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": True}, "is_causal"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e5}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {}, "rope_theta": None}, "rope_theta is missing"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "mamba"]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
        ({"intermediate_size": 64}, r"mlp\..*\(.*48.*64"),
    ],
)
def test_values_that_cannot_be_served_are_rejected(
    exported: Path, change: dict[str, Any], message: str
) -> None:
    edit(exported, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        load_drafter(exported)


def test_foreign_tensors_are_rejected(exported: Path) -> None:
    weights = load_file(exported / "model.safetensors")
    save_file(weights | {"embed_tokens.weight": torch.zeros(4, 4)}, exported / "model.safetensors")
    with pytest.raises(UserError, match=r"embed_tokens.weight is \(4, 4\).*no such tensor"):
        load_drafter(exported)


def test_files_that_cannot_be_read_are_one_message(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing/config.json: cannot be read"):
        load_drafter(tmp_path / "nothing")
    (exported / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        load_drafter(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not JSON"):
        load_drafter(exported)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "tensors of .* numbers; config.json asks for 1000000000 layers"),
        ({"hidden_size": 2**40}, "tensors of .* numbers; config.json asks for"),
        ({"intermediate_size": 2**62}, "tensors of .* numbers; config.json asks for"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; allowed: a whole number from 1"),
        ({"head_dim": "8"}, "head_dim is '8'; allowed: a whole number from 1"),
        ({"hidden_size": float("nan")}, "hidden_size is nan; allowed: a whole number from 1"),
        ({"block_size": [8]}, r"block_size is \[8\]; allowed: a whole number"),
        ({"dflash_config": [1]}, r"dflash_config is \[1\]; allowed: a mapping"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed: a number above 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; allowed: a number above 0"),
        ({"layer_types": 3}, "layer_types is 3; allowed: a list"),
        ({"layer_types": [{}]}, r"layer_types is \[{}\]; allowed: a list"),
        ({"use_sliding_window": True, "sliding_window": -5}, "sliding_window is -5; allowed: a whole number"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; allowed: a mapping"),
        ({"rope_parameters": {"rope_theta": [1]}}, r"rope_theta is \[1\]; allowed: a number above 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf; allowed: a number above 0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}},
            "rope_parameters.factor is 0; allowed: a number above 0",
        ),
    ],
)
def test_a_hostile_configuration_is_rejected_before_it_is_built(
    exported: Path, change: dict[str, Any], message: str
) -> None:
    edit(exported, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        load_drafter(exported)


def test_pickled_weights_and_deep_configurations_are_rejected(exported: Path) -> None:
    (exported / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        load_drafter(exported)
    for text in ("[" * 100_000, "[]"):
        (exported / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json: (not JSON|holds)"):
            load_drafter(exported)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"sliding_window": 12, "sliding_layers": (0,)},
        {"attention_bias": True},
    ],
)
def test_what_only_published_drafters_have_survives(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = DFlashDrafter(replace(SHAPE, **changes))
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_drafter(drafter, tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter")
    assert again.shape == drafter.shape
    assert torch.equal(outputs(again), outputs(drafter))
    assert not torch.equal(outputs(again), outputs(DFlashDrafter(SHAPE)))


def test_mixed_layers_are_written_as_transformers_reads_them(tmp_path: Path) -> None:
    shape = replace(SHAPE, sliding_window=12, sliding_layers=(1,))
    save_drafter(DFlashDrafter(shape), tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 12)
    assert [shape.window_of(i) for i in range(2)] == [None, 12]


def test_the_older_layout_of_a_scaled_rotary_embedding_is_read(exported: Path) -> None:
    older = {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {**YARN, "type": "yarn"}}
    edit(exported, lambda config: config.update(older))
    shape = load_drafter(exported).shape
    assert shape.rope_theta == 1e6
    assert shape.rope_scaling == YARN
