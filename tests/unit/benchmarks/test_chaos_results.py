"""What benchmarks/chaos.py looks for after a round: temporaries of every writer, and values that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.chaos_results import _temporary_files, differences, run_results
from dflash_core.files import temporary_name


def test_temporaries_are_found_wherever_they_are_and_locks_are_none(tmp_path: Path) -> None:
    root, temporary = tmp_path / "runs", tmp_path / "tmp"
    (root / "store" / "plan").mkdir(parents=True)
    temporary.mkdir()
    (root / "quickstart").mkdir()
    (root / "quickstart" / ".lock").touch()
    assert list(_temporary_files(root, temporary)) == []
    left = temporary_name(root / "store" / "plan" / "0123456789abcdef")
    left.mkdir()
    (root / "quickstart" / "step-00000005.tmp").mkdir()
    (temporary / "tmpabc").touch()
    assert sorted(_temporary_files(root, temporary)) == [
        "temporary left in TMPDIR: tmpabc",
        "temporary left: quickstart/step-00000005.tmp",
        f"temporary left: store/plan/{left.name}",
    ]


def test_a_difference_is_named_by_its_place() -> None:
    expected = {"losses": [[1, 6.5], [2, 5.0]], "report": {"train": {"steps": 2}}}
    assert differences(expected, expected) == []
    other = {"losses": [[1, 6.5], [2, 5.5]], "report": {"train": {}}}
    assert differences(other, expected) == [
        "losses[1][1] differs: 5.5, expected 5.0",
        "report.train.steps differs: None, expected 2",
    ]
    shorter = differences({**expected, "losses": [[1, 6.5]]}, expected)
    assert shorter == ["losses differs: [[1, 6.5]], expected [[1, 6.5], [2, 5.0]]"]


def test_all_results_of_a_run_are_compared(tmp_path: Path) -> None:
    """`run.json` names the plans relative to the run."""
    plan, run = tmp_path / "store" / "plan" / "p" / "epoch-000.parquet", tmp_path / "quickstart" / "r"
    plan.parent.mkdir(parents=True)
    plan.write_bytes(b"plan")
    (run / "drafter").mkdir(parents=True)
    (run / "drafter" / "model.safetensors").write_bytes(b"weights")
    (run.parent / "latest").symlink_to("r")
    paths = {"plans": ["../../store/plan/p/epoch-000.parquet"]}
    (run / "run.json").write_text(json.dumps({"run_key": "k", "paths": paths}))
    (run / "report.json").write_text(json.dumps({"train": {"steps": 1, "tokens_per_second": 9.0}}))
    lines = [{"step": 1, "train/loss": 2.0}, {"step": 1, "validation/loss": 3.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = run_results(tmp_path)
    assert results["report"] == {"train": {"steps": 1}}
    assert results["losses"] == [[1, 2.0]]
    assert results["validation"] == [[1, 3.0]]
    assert list(results["plans"]) == ["store/plan/p/epoch-000.parquet"]
    paths["plans"].clear()
    (run / "run.json").write_text(json.dumps({"run_key": "k", "paths": paths}))
    with pytest.raises(ValueError, match="a run without plans"):
        run_results(tmp_path)
