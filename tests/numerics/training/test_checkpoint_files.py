"""A checkpoint directory that a stranger wrote: nothing in it is executed, and one message says why."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from dflash_core.errors import UserError
from dflash_core.training import checkpoint
from dflash_core.training.checkpoint import Checkpointer
from dflash_core.training.checkpoint_files import read_index
from dflash_core.training.state import State

NAME = "model.weight"


class Touch:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def parts() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Checkpointer(tmp_path, keep_last=1, group=None).save(State(), *parts(), wait=True)
    return tmp_path / "step-00000000"


def rewrite(directory: Path, name: str, content: bytes) -> None:
    """Replace a file, and its entry in the manifest, as a stranger can."""
    (directory / name).write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = checkpoint._describe(directory / name)
    (directory / "manifest.json").write_text(json.dumps(manifest))


def load(directory: Path) -> None:
    Checkpointer(directory.parent, keep_last=1, group=None).load(directory, *parts())


def test_no_code_of_the_index_is_executed(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    rewrite(saved, ".metadata", pickle.dumps(Touch(made)))
    with pytest.raises(UserError, match=r"\.metadata: not an index of tensors: it names pathlib\S*touch"):
        load(saved)
    assert not made.exists()


def test_no_code_of_an_object_next_to_the_tensors_is_executed(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    index = pickle.loads((saved / ".metadata").read_bytes())
    entry = metadata.BytesStorageMetadata()
    entry.size = index.state_dict_metadata[NAME].size
    index.state_dict_metadata[NAME] = entry
    rewrite(saved, ".metadata", pickle.dumps(index))
    rewrite(saved, "__0_0.distcp", pickle.dumps(Touch(made)))
    with pytest.raises(UserError, match="BytesStorageMetadata, which is no part of an index of tensors"):
        load(saved)
    assert not made.exists()


def test_no_code_of_a_tensor_is_executed(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    rewrite(saved, "__0_0.distcp", pickle.dumps(Touch(made), protocol=2))
    with pytest.raises(UserError, match="step-00000000: its tensors cannot be read"):
        load(saved)
    assert not made.exists()


@pytest.mark.parametrize("file", ["../state.json", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_the_checkpoint_are_rejected(saved: Path, file: str) -> None:
    index = pickle.loads((saved / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = file
    rewrite(saved, ".metadata", pickle.dumps(index))
    with pytest.raises(UserError, match="which is not directly inside"):
        load(saved)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", pickle.dumps(3), pickle.dumps({"a": torch.Size([1])})]
)
def test_a_damaged_index_is_rejected(saved: Path, content: bytes) -> None:
    rewrite(saved, ".metadata", content)
    with pytest.raises(UserError, match=r"\.metadata: not an index of tensors"):
        read_index(saved)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "does not list .metadata"),
        ([], "cannot be read"),
        ({"state.json": 3}, "cannot be read"),
        (
            {n: {"bytes": 1, "blake2b": ""} for n in (".metadata", "state.json", "../a")},
            "not directly inside",
        ),
    ],
)
def test_a_manifest_of_odd_contents_is_a_defect(saved: Path, files: Any, words: str) -> None:
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    assert words in (checkpoint.verify(saved) or "")
