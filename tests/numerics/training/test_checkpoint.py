"""Checkpoints: complete or absent, exact, pruned, and rejected where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_core.config import OptimizerConfig
from dflash_core.errors import UserError
from dflash_core.training import checkpoint
from dflash_core.training.checkpoint import Checkpointer, check_free_disk, verify
from dflash_core.training.optim import build_optimizer
from dflash_core.training.state import State, changed_fields, read_state


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False))
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    advance(model, optimizer, range(steps))
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def store(directory: Path, keep_last: int = 2) -> Checkpointer:
    return Checkpointer(directory, keep_last=keep_last, group=None)


def test_a_loaded_run_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    checkpoints = store(tmp_path)
    state = State(
        step=3, updates=3, best_value=1.5, best_step=2, mlflow_run_id="abc", facts={"data": {"seed": 1}}
    )
    checkpoints.save(state, model, optimizer, wait=True)
    other, other_optimizer = trained(0, seed=9)
    path, skipped = store(tmp_path).newest()
    assert path is not None
    assert skipped == []
    assert store(tmp_path).load(path, other, other_optimizer) == state
    for m, o in ((model, optimizer), (other, other_optimizer)):
        advance(m, o, range(3, 6))
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_saving_copies_before_the_next_step_changes_the_weights(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    before = model[0].weight.detach().clone()
    checkpoints = store(tmp_path)
    checkpoints.save(State(step=1, updates=1), model, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(7)
    checkpoints.wait()
    checkpoints.load(tmp_path / "step-00000001", model, None)
    assert torch.equal(model[0].weight, before)


def test_state_before_the_first_update(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    store(tmp_path).save(State(), model, optimizer, wait=True)
    other, other_optimizer = trained(0, seed=9)
    store(tmp_path).load(tmp_path / "step-00000000", other, other_optimizer)
    advance(model, optimizer, range(2))
    advance(other, other_optimizer, range(2))
    assert torch.equal(model[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "manifest.json").unlink(), "not completely written"),
        (lambda d: (d / "manifest.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "state.json").unlink(), "state.json is missing"),
        (lambda d: truncate(next(d.glob("*.distcp"))), "bytes"),
        (lambda d: flip(next(d.glob("*.distcp"))), "differs from what was written"),
    ],
)
def test_a_damaged_newest_is_skipped_with_a_line(tmp_path: Path, damage, words: str) -> None:
    model, optimizer = trained(1)
    checkpoints = store(tmp_path)
    for step in (1, 2):
        checkpoints.save(State(step=step, updates=1), model, optimizer, wait=True)
    damage(tmp_path / "step-00000002")
    path, skipped = checkpoints.newest()
    assert path == tmp_path / "step-00000001"
    assert len(skipped) == 1
    assert "step-00000002" in skipped[0]
    assert words in skipped[0]
    with pytest.raises(UserError, match="allowed: a complete checkpoint"):
        checkpoints.load(tmp_path / "step-00000002", model, optimizer)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    checkpoints = store(tmp_path, keep_last=2)
    for step in range(1, 7):
        checkpoints.save(State(step=step, best_step=2 if step >= 2 else None), model, optimizer, wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoints.at_step(2) == tmp_path / "step-00000002"
    assert checkpoints.at_step(3) is None
    assert checkpoints.at_step(None) is None


def test_a_failed_save_leaves_nothing_and_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(1)
    checkpoints = store(tmp_path)
    checkpoints.save(State(step=1), model, optimizer, wait=True)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", full)
    with pytest.raises(OSError, match=r"step-00000002 could not be written .*No space left on device"):
        checkpoints.save(State(step=2), model, optimizer, wait=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000009.tmp").mkdir()
    assert store(tmp_path).newest() == (None, [])
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_of_another_shape_is_rejected_by_name(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    store(tmp_path).save(State(step=1, updates=1), model, optimizer, wait=True)
    other = nn.Sequential(nn.Linear(4, 5, bias=False))
    with pytest.raises(UserError, match=r"model\.0\.weight has shape"):
        store(tmp_path).load(tmp_path / "step-00000001", other, None)


def test_a_state_of_another_version_is_rejected_by_name(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    store(tmp_path).save(State(step=1), model, optimizer, wait=True)
    path = tmp_path / "step-00000001" / "state.json"
    values = json.loads(path.read_text())
    values["epoch_cursor"] = values.pop("samples")
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="epoch_cursor, samples"):
        read_state(path.parent)
    assert verify(path.parent) is not None


def test_changed_fields_are_named_with_both_values() -> None:
    old = {"drafter": {"block_size": 8, "mask_token_id": 3}, "inputs": {"data": "a"}}
    new = {"drafter": {"block_size": 16, "mask_token_id": 3}, "inputs": {"data": "b"}}
    assert changed_fields(old, new) == ["drafter.block_size: 8 -> 16", "inputs.data: 'a' -> 'b'"]


def test_free_disk_is_checked_before_the_run(tmp_path: Path) -> None:
    check_free_disk(tmp_path, num_parameters=1000, keep_last=2)
    with pytest.raises(UserError, match="keep_last"):
        check_free_disk(tmp_path, num_parameters=10**14, keep_last=2)
