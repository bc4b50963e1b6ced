"""What a rank starts from: first weights of a seed or of an exported drafter, and the target's frozen ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.config import UserError
from dflash_core.model.drafter import DFlashDrafter, DrafterShape
from dflash_core.model.export import save_drafter
from dflash_core.model.target import Target
from dflash_core.training import setup
from tests.tiny_target import make_tiny_target
from tests.training_run import write_run

DEVICE = torch.device("cpu")
IDS = (0, 2)


def load(root: Path, target: Path, changes: dict | None = None) -> setup.Run:
    run_dir, _ = write_run(root, target, changes, name="run", num_samples=12)
    return setup.Run.load(run_dir / "run.json")


def build(run: setup.Run) -> DFlashDrafter:
    return setup.build_drafter(run, setup.load_target_config(run), IDS, DEVICE)


@pytest.mark.parametrize("place", ["an export", "a run"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_of_an_exported_drafter(
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


def test_first_weights_of_a_seed(tmp_path: Path, tiny_target_dir: Path) -> None:
    first, again, other = (
        build(load(tmp_path / str(i), tiny_target_dir, {"training": {"seed": seed}})).fc.weight
        for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_an_exported_drafter_of_another_shape_is_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    shape = build(load(tmp_path / "first", tiny_target_dir)).shape
    other = DrafterShape(**{**vars(shape), "mask_token_id": 1, "sliding_window": 32})
    save_drafter(DFlashDrafter(other), tmp_path / "given")
    run = load(tmp_path / "second", tiny_target_dir, {"training": {"init_from": str(tmp_path / "given")}})
    with pytest.raises(UserError, match=r"training.init_from: .*mask_token_id.*1.*3.*sliding_window.*32"):
        build(run)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets_with_and_without_it(tied: bool, tmp_path: Path) -> None:
    """A rank that only trains reads two tensors, or the one that is stored when they are tied."""
    directory = make_tiny_target(tmp_path / "target", tie_word_embeddings=tied)
    run = load(tmp_path, directory)
    config = setup.load_target_config(run)
    target = Target.load(directory, layer_ids=IDS, compute_dtype="float32")
    whole, alone = (setup.load_heads(run, config, t, DEVICE, torch.float32) for t in (target, None))
    assert torch.equal(whole.embed_VD, alone.embed_VD) and torch.equal(whole.head_VD, alone.head_VD)
    assert torch.equal(whole.embed_VD, whole.head_VD) == tied


def test_the_first_layer_of_the_target(tmp_path: Path, tiny_target_dir: Path) -> None:
    """The target's last captured layer (2 of ids 0, 2), where shapes agree; the rest is of the seed."""
    plain = build(load(tmp_path / "plain", tiny_target_dir)).state_dict()
    run = load(tmp_path / "run", tiny_target_dir, {"training": {"first_layer": "target"}})
    built = build(run).state_dict()
    layer = Target.load(tiny_target_dir, layer_ids=IDS, compute_dtype="float32").layers[2].state_dict()
    same = [n for n, w in layer.items() if torch.equal(built[f"layers.0.{n}"], w)]
    assert {"self_attn.q_proj.weight", "self_attn.o_proj.weight"} <= set(
        same
    )  # the drafter's MLP is narrower
    changed = [name for name in built if not torch.equal(built[name], plain[name])]
    assert changed and all(name.startswith("layers.0.") for name in changed)
    assert build(run).state_dict().keys() == built.keys()


def test_a_first_layer_of_another_shape_is_refused(tmp_path: Path, tiny_target_dir: Path) -> None:
    run = load(
        tmp_path,
        tiny_target_dir,
        {"training": {"first_layer": "target"}, "drafter": {"num_heads": 1, "num_kv_heads": 1}},
    )
    with pytest.raises(UserError, match="training.first_layer: 'target' is not allowed, layer 2 of"):
        build(run)
    with pytest.raises(
        UserError, match="training.first_layer: 'target' is not allowed; allowed: 'random' with"
    ):
        load(tmp_path / "b", tiny_target_dir, {"training": {"first_layer": "target", "init_from": "x"}})
