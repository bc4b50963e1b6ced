"""Nothing that a run references is removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from tasks import prune as pruning
from tasks.storage.live_runs import live_note, mark_used


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make three runs of a deployment over a target, shards and a plan each, and one unused plan."""
    for name in (
        "target/t",
        "ingest/a",
        "ingest/b",
        "plan/p0",
        "plan/p1",
        "plan/p2",
        "plan/unused",
        "plan/.left-1-x",
    ):
        directory = tmp_path / "store" / name
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(b"12345")
        os.utime(directory, (1, 1))
    for number in range(3):
        run = tmp_path / "d" / f"run{number}"
        run.mkdir(parents=True)
        paths = {
            "run": str(run),
            "target": str(tmp_path / "store/target/t/model"),
            "shards": [str(tmp_path / "store/ingest" / ("a" if number == 0 else "b") / "shard")],
            "plans": [str(tmp_path / f"store/plan/p{number}/epoch-000.parquet")],
        }
        (run / "run.json").write_text(json.dumps({"paths": paths}))
        for path in (run / "run.json", run):
            os.utime(path, (100 + number, 100 + number))
    (tmp_path / "d" / "latest").symlink_to("run2")
    return tmp_path


def names(
    root: Path, keep_runs: int | None = None, protected: set[Path] | None = None, now: float = 1e9
) -> list[str]:
    removable = pruning.find_removable(root, keep_runs=keep_runs, protected_runs=protected or set(), now=now)
    return [str(item.path.relative_to(root)) for item in removable]


def test_only_outputs_that_no_run_references(root: Path) -> None:
    assert names(root) == ["store/plan/.left-1-x", "store/plan/unused"]


def test_old_runs_are_removed_with_the_outputs_that_only_they_used(root: Path) -> None:
    assert names(root, keep_runs=1) == [
        "d/run0",
        "d/run1",
        "store/ingest/a",
        "store/plan/.left-1-x",
        "store/plan/p0",
        "store/plan/p1",
        "store/plan/unused",
    ]


def test_latest_and_registered_runs_stay(root: Path) -> None:
    (root / "d" / "latest").unlink()
    (root / "d" / "latest").symlink_to("run0")
    assert "d/run0" not in names(root, keep_runs=1)
    assert "d/run1" not in names(root, keep_runs=1, protected={root / "d" / "run1"})


def test_young_outputs_may_belong_to_a_running_flow(root: Path) -> None:
    now = time.time()
    os.utime(root / "store/plan/unused", (now, now))
    assert names(root, now=now + 60) == ["store/plan/.left-1-x"]


def test_removal(root: Path) -> None:
    removable = pruning.find_removable(root, keep_runs=None, protected_runs=set(), now=1e9)
    assert [item.num_bytes for item in removable] == [5, 5]
    assert pruning.remove(root, removable) == removable
    assert sorted(p.name for p in (root / "store" / "plan").iterdir()) == ["p0", "p1", "p2"]
    assert (root / "store/target/t/file").exists()


def test_a_moved_root_still_refers_to_its_outputs(root: Path) -> None:
    """Absolute paths are those of before; the paths that runs write today are relative."""
    moved = root.rename(root.with_name("moved"))
    assert names(moved) == ["store/plan/.left-1-x", "store/plan/unused"]
    run = moved / "d" / "run0" / "run.json"
    paths = {"run": ".", "target": "../../store/target/t/model", "shards": ["../../store/ingest/a/shard"]}
    run.write_text(json.dumps({"paths": paths | {"plans": ["../../store/plan/p0/epoch-000.parquet"]}}))
    assert names(moved) == ["store/plan/.left-1-x", "store/plan/unused"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"paths": 5}'])
def test_nothing_is_removed_where_a_run_json_is_damaged(root: Path, text: str) -> None:
    (root / "d" / "run0" / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run0.run\.json cannot be read .* nothing is removed"):
        names(root)


def test_what_a_live_run_may_use_stays(root: Path) -> None:
    """A flow marks what it uses, however old; another one is removed although the flow lives."""
    removable = pruning.find_removable(root, keep_runs=1, protected_runs=set(), now=1e12)
    with live_note(root, "flow-run", "train-dflash"):
        for name in ("store/plan/unused", "d/run0"):
            mark_used(root / name)
        assert names(root, keep_runs=1, now=1e12) == [
            "d/run1",
            "store/plan/.left-1-x",
            "store/plan/p1",
        ]
        # Found before the flow started.
        removed = [item.path.name for item in pruning.remove(root, removable)]
    # The run that got its name back keeps its inputs.
    assert removed == ["run1", ".left-1-x", "p1"]
    assert (root / "store/plan/unused/file").exists()
    assert (root / "d/run0/run.json").exists()
    assert names(root, now=1e12) == ["store/plan/unused"]


def test_a_checked_target_keeps_the_model_that_it_links_to(root: Path) -> None:
    checked = root / "store" / "check-target" / "c"
    checked.mkdir(parents=True)
    (root / "store" / "target" / "t" / "model").mkdir()
    (checked / "model").symlink_to(Path("..", "..", "target", "t", "model"))
    for number in range(3):
        path = root / "d" / f"run{number}" / "run.json"
        contents = json.loads(path.read_text())
        contents["paths"]["target"] = "../../store/check-target/c/model"
        path.write_text(json.dumps(contents))
    for directory in (checked, root / "store" / "target" / "t"):
        os.utime(directory, (1, 1))
    assert names(root) == ["store/plan/.left-1-x", "store/plan/unused"]
