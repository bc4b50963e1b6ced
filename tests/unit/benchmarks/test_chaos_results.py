"""What benchmarks/chaos.py looks for after a round: temporaries of every writer, and values that differ."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.chaos_results import _temporary_files, differences
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
