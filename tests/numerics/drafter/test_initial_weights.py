"""Initial weights of a drafter: of a seed, of an exported drafter, or of the target's own layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from benchmarks.support.tiny_run import write_run
from benchmarks.support.tiny_target import make_tiny_target
from dflash_core.config import DrafterConfig
from dflash_core.drafter.drafter import DFlashDrafter
from dflash_core.drafter.export import save_drafter
from dflash_core.drafter.initial_weights import counterparts, empty_model, offset_of
from dflash_core.drafter.shape import DrafterShape, drafter_shape
from dflash_core.errors import UserError
from dflash_core.target.shape import read_shape
from dflash_core.target.target import Target
from dflash_core.training.run import RunSpec, build_drafter, load_target_config

IDS = (0, 2)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with norms that are not all ones, so that a norm that was not copied shows."""
    directory = make_tiny_target(tmp_path_factory.mktemp("target"))
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    for number, name in enumerate(sorted(tensors)):
        if name.endswith("norm.weight"):
            tensors[name] = tensors[name] + 0.01 * number
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def load(root: Path, target: Path, changes: dict | None = None) -> RunSpec:
    run_dir, _ = write_run(root, target, changes, name="run", num_samples=12)
    return RunSpec.load(run_dir / "run.json")


def build(run: RunSpec) -> DFlashDrafter:
    return build_drafter(run, load_target_config(run), IDS, torch.device("cpu"))


@pytest.mark.parametrize("place", ["an export", "a run"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_of_an_exported_drafter(
    place: str, dtype: torch.dtype, tmp_path: Path, tiny_target_dir: Path
) -> None:
    shape = build(load(tmp_path / "first", tiny_target_dir)).shape
    given = DFlashDrafter(shape, torch.Generator().manual_seed(11))
    source = tmp_path / "given"
    save_drafter(given, source / "drafter" if place == "a run" else source, dtype=dtype)
    run = load(tmp_path / "second", tiny_target_dir, {"training": {"init_from": str(source)}})
    drafter = build(run)
    for name, p in drafter.state_dict().items():
        assert p.dtype == torch.float32  # master weights, whatever is stored
        assert torch.equal(p, given.state_dict()[name].to(dtype).float())


def test_initial_weights_of_a_seed(tmp_path: Path, tiny_target_dir: Path) -> None:
    first, again, other = (
        build(load(tmp_path / str(i), tiny_target_dir, {"training": {"seed": seed}})).fc.weight
        for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_exported_drafter_of_another_shape_is_rejected(tmp_path: Path, tiny_target_dir: Path) -> None:
    shape = build(load(tmp_path / "first", tiny_target_dir)).shape
    other = DrafterShape(**{**vars(shape), "mask_token_id": 1, "sliding_window": 32})
    save_drafter(DFlashDrafter(other), tmp_path / "given")
    run = load(tmp_path / "second", tiny_target_dir, {"training": {"init_from": str(tmp_path / "given")}})
    with pytest.raises(UserError, match=r"training.init_from: .*mask_token_id.*1.*3.*sliding_window.*32"):
        build(run)


def test_initial_weights_of_the_target(tmp_path: Path, target_dir: Path) -> None:
    """Captured are layers 0 and 2 of four: one drafter layer starts as layer 3, where shapes agree."""
    plain = build(load(tmp_path / "plain", target_dir)).state_dict()
    run = load(tmp_path / "run", target_dir, {"training": {"first_weights": "target"}})
    built = build(run).state_dict()
    target = Target.load(target_dir, layer_ids=IDS, compute_dtype="float32")
    layer = target.layers[3].state_dict()
    for name in ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm", "post_attention_layernorm"):
        assert torch.equal(built[f"layers.0.{name}.weight"], layer[f"{name}.weight"])
    assert torch.equal(built["norm.weight"], target.decoder.norm.weight)
    assert torch.equal(built["hidden_norm.weight"], layer["input_layernorm.weight"])
    width = target.width_D
    assert torch.equal(built["fc.weight"], torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1))
    unchanged = {name for name in built if torch.equal(built[name], plain[name])} - {"norm.weight"}
    assert "layers.0.mlp.up_proj.weight" in unchanged  # the drafter's MLP is narrower
    again = build(run).state_dict()
    assert all(torch.equal(again[name], built[name]) for name in built)


def test_the_context_starts_with_the_targets_own_values(tmp_path: Path, target_dir: Path) -> None:
    """Values of the drafter's context are those of the target's next layer for the same tokens."""
    run = load(tmp_path / "run", target_dir, {"training": {"first_weights": "target"}})
    drafter = build(run)
    target = Target.load(target_dir, layer_ids=IDS, compute_dtype="float32")
    captured = target.capture(np.arange(4, 12), np.array([0, 8], dtype=np.int32))
    theirs: list[torch.Tensor] = []
    projection = target.layers[3].self_attn.v_proj
    projection.register_forward_hook(lambda module, args, output: theirs.append(output))
    target.capture(np.arange(4, 12), np.array([0, 8], dtype=np.int32), want_last_hidden=True)
    with torch.inference_mode():
        ours = drafter.layers[0].self_attn.v_proj(drafter.project_context(captured.hidden))
    torch.testing.assert_close(ours, theirs[0].reshape(ours.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "first"), [(1, 3), (2, 2), (4, 0), (5, 0)])
def test_which_layers_a_drafter_starts_as(layers: int, first: int, tmp_path: Path, target_dir: Path) -> None:
    run = load(
        tmp_path, target_dir, {"training": {"first_weights": "target"}, "drafter": {"num_layers": layers}}
    )
    drafter = build(run)
    target = Target.load(target_dir, layer_ids=IDS, compute_dtype="float32")
    same = [
        i
        for i, ours in enumerate(drafter.layers)
        for theirs in target.layers[first + i : first + i + 1]
        if torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    ]
    assert same == list(range(min(layers, 4)))
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)


def test_norms_that_store_their_weight_less_one() -> None:
    gemma = Gemma3RMSNorm(4)
    assert offset_of(gemma) == 1.0
    assert offset_of(LlamaRMSNorm(4)) == 0.0
    assert offset_of(NemotronLayerNorm1P(4)) == 1.0  # subtracts the mean, too
    assert offset_of(torch.nn.LayerNorm(4)) == 0.0
    assert offset_of(torch.nn.Linear(4, 2)) == 0.0


def test_layers_that_norm_elsewhere_keep_their_norm_in_front_of_the_mlp(tmp_path: Path) -> None:
    """Olmo2's post_attention_layernorm stands behind attention, a drafter's in front of the MLP."""
    from transformers import Olmo2Config

    config = Olmo2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = empty_model(config, trust_remote_code=False)
    shape = drafter_shape(read_shape(config), DrafterConfig(num_layers=1, block_size=4, mask_token_id=3), IDS)
    drafter = DFlashDrafter(shape)
    ours = {id(p): name for name, p in drafter.named_parameters()}
    copied = {ours[id(p)] for p, _, _ in counterparts(drafter, model)}
    assert "layers.0.self_attn.o_proj.weight" in copied
    assert "norm.weight" in copied
    assert not any("layernorm" in name for name in copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 1, "num_kv_heads": 1}, "drafter.num_heads 1, the target has 4"),
        ({"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}, "drafter.num_heads 2, the target has 4"),
    ],
)
def test_initial_weights_of_a_target_with_other_heads_are_rejected(
    changes: dict, message: str, tmp_path: Path, target_dir: Path
) -> None:
    """Also where shapes agree: two heads of 32 channels are not four heads of 16."""
    run = load(tmp_path, target_dir, {"training": {"first_weights": "target"}, "drafter": changes})
    with pytest.raises(UserError, match=f"training.first_weights: 'target' is not allowed with {message}"):
        build(run)


@pytest.mark.parametrize("kind", ["renamed", "below the head", "quantised"])
def test_initial_weights_of_other_checkpoints(kind: str, tmp_path: Path, target_dir: Path) -> None:
    directory = tmp_path / "target"
    shutil.copytree(target_dir, directory)
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    prefix = {"renamed": "other.", "below the head": ""}.get(kind, "model.")
    tensors = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if kind == "quantised":
        tensors = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    run = load(tmp_path, directory, {"training": {"first_weights": "target"}})
    if kind == "below the head":
        same = build(run).layers[0].self_attn.q_proj.weight
        assert torch.equal(same, tensors["layers.3.self_attn.q_proj.weight"])
        return
    state = {"renamed": "missing", "quantised": "float8_e4m3fn"}[kind]
    with pytest.raises(UserError, match=f"training.first_weights: .*layers.3.* in .* is {state}"):
        build(run)


def test_initial_weights_come_from_one_source(tmp_path: Path, target_dir: Path) -> None:
    message = "training.first_weights: 'target' is not allowed; allowed: 'random' with"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "b", target_dir, {"training": {"first_weights": "target", "init_from": "x"}})
