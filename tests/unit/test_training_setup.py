"""A checkpoint named by hand: every field that does not fit is named, with both values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.training.checkpoint import State
from dflash_core.training.run import Run, check_fits
from tests.training_run import write_run


def test_a_checkpoint_that_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    def facts(run_dir: Path) -> dict:
        run = Run.load(run_dir / "run.json")
        return run.facts(run.open_schedule(run.open_store()))

    here, _ = write_run(tmp_path, tiny_target_dir, {"training": {"epochs": 1}}, name="here")
    stored = State(step=7, facts={**facts(here), "dtypes": {"target": "float32"}})
    check_fits(Path("step-00000007"), stored, facts(here))
    target = shutil.copytree(tiny_target_dir, tmp_path / "target")
    (target / "generation_config.json").write_text('{"eos_token_id": 1}')
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    changes = {
        "drafter": {"mask_token_id": 2, "block_size": 6, "target_layer_ids": [1, 2]},
        "data": {"chat_template": str(template)},
        "optimizer": {"lr": 1e-3, "schedule": "wsd"},
        "training": {"epochs": 1, "keep_last": 9, "topology": "split"},  # how it runs may change
    }
    there, _ = write_run(tmp_path, target, changes, name="there", num_samples=50)
    with pytest.raises(UserError) as refusal:
        check_fits(Path("step-00000007"), stored, facts(there))
    message = str(refusal.value)
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
        old, new = stored.facts["inputs"][name], facts(there)["inputs"][name]
        assert old != new and f"inputs.{name}: {old!r} -> {new!r}" in message
    assert "keep_last" not in message and "topology" not in message
