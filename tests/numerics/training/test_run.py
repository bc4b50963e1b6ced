"""From run.json to the parts of a run: which checkpoint fits, and the target's frozen ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.support.tiny_run import write_run
from benchmarks.support.tiny_target import make_tiny_target
from dflash_core.config import RunConfig, to_dict
from dflash_core.errors import UserError
from dflash_core.target.target import Target
from dflash_core.training.run import RunSpec, check_compatible, load_ends, load_target_config
from dflash_core.training.state import State


def test_a_checkpoint_that_does_not_fit_is_rejected_with_both_values(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    """Every field that does not fit is named."""

    def facts(run_dir: Path) -> dict:
        run = RunSpec.load(run_dir / "run.json")
        return run.facts(run.open_schedule(run.open_store()))

    here, _ = write_run(tmp_path, tiny_target_dir, {"training": {"epochs": 1}}, name="here")
    stored = State(step=7, facts={**facts(here), "dtypes": {"target": "float32"}})
    check_compatible(Path("step-00000007"), stored, facts(here))
    target = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (target / "generation_config.json").write_text('{"eos_token_id": 1}')
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    changes = {
        "drafter": {"mask_token_id": 2, "block_size": 6, "target_layer_ids": [1, 2]},
        "data": {"chat_template": str(template)},
        "optimizer": {"lr": 1e-3, "schedule": "wsd"},
        # Execution settings may change.
        "training": {"epochs": 1, "keep_last": 9, "topology": "split"},
    }
    other, _ = write_run(tmp_path, target, changes, name="there", num_samples=50)
    with pytest.raises(UserError) as rejection:
        check_compatible(Path("step-00000007"), stored, facts(other))
    message = str(rejection.value)
    for line in (
        "drafter.mask_token_id: 3 -> 2",
        "drafter.block_size: 4 -> 6",
        "drafter.target_layer_ids: [0, 2] -> [1, 2]",
        f"data.chat_template: None -> {str(template)!r}",
        "optimizer.lr: 0.003 -> 0.001",
        "optimizer.schedule: 'cosine' -> 'wsd'",
    ):
        assert line in message
    for name in ("data", "plans", "target"):
        old, new = stored.facts["inputs"][name], facts(other)["inputs"][name]
        assert old != new
        assert f"inputs.{name}: {old!r} -> {new!r}" in message
    assert "keep_last" not in message
    assert "topology" not in message


def test_a_run_json_with_relative_paths_may_move_with_its_inputs(tmp_path: Path) -> None:
    run_dir = tmp_path / "root" / "d" / "key"
    run_dir.mkdir(parents=True)
    paths = {"run": ".", "target": "../../store/target/t/model", "shards": ["../../store/s"], "plans": ["/p"]}
    contents = {"config": to_dict(RunConfig()), "paths": paths, "run_key": "k"}
    (run_dir / "run.json").write_text(json.dumps(contents))
    (tmp_path / "root").rename(tmp_path / "moved")
    root = tmp_path / "moved"
    run = RunSpec.load(root / "d" / "key" / "run.json")
    assert run.directory == root / "d" / "key"
    assert run.target == root / "store" / "target" / "t" / "model"
    assert run.shards == (root / "store" / "s",)
    assert run.plans == (Path("/p"),)
    assert run.cache == root / "d" / "key" / "captures"


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets_with_and_without_it(tied: bool, tmp_path: Path) -> None:
    """A rank that only trains reads two tensors, or the one that is stored when they are tied."""
    directory = make_tiny_target(tmp_path / "target", tie_word_embeddings=tied)
    run_dir, _ = write_run(tmp_path, directory, name="run", num_samples=12)
    run = RunSpec.load(run_dir / "run.json")
    config = load_target_config(run)
    target = Target.load(directory, layer_ids=(0, 2), compute_dtype="float32")
    whole, alone = (load_ends(run, config, t, torch.device("cpu"), torch.float32) for t in (target, None))
    assert torch.equal(whole.embed_VD, alone.embed_VD)
    assert torch.equal(whole.head_VD, alone.head_VD)
    assert torch.equal(whole.embed_VD, whole.head_VD) == tied
