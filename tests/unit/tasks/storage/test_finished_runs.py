"""Outputs of finished runs that were changed after they had been written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from tasks.storage.file_digests import FileDigests
from tasks.storage.finished_runs import check_drafter, check_figures, drafter_defect, mark_finished


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "d" / "key"
    (directory / "drafter").mkdir(parents=True)
    for name in ("drafter/config.json", "drafter/model.safetensors", "summary.json", "metrics.jsonl"):
        (directory / name).write_text(f'{{"name": "{name}"}}\n')
    mark_finished(directory, {"steps": 3})
    return directory


def test_a_whole_run_has_no_defect(run: Path, tmp_path: Path) -> None:
    digests = FileDigests(tmp_path)
    assert drafter_defect(run, digests) is None
    check_figures(run)
    check_drafter(run / "drafter", digests)
    assert json.loads((run / "finished.json").read_text())["summary"] == {"steps": 3}


@pytest.mark.parametrize(
    "name, content, defect",
    [
        ("drafter/model.safetensors", b"{}", "drafter/model.safetensors has 2 bytes, 38 were written"),
        ("drafter/config.json", b"x" * 32, "drafter/config.json was changed after it had been written"),
        ("finished.json", b"[" * 100_000, "finished.json cannot be read"),
        ("finished.json", b'{"files": {}}', "finished.json cannot be read or lacks 'drafter/config.json'"),
        ("finished.json", b'{"files": []}', "finished.json cannot be read"),
        ("finished.json", b"\xff", "finished.json cannot be read"),
    ],
)
def test_a_changed_drafter_is_not_used(
    run: Path, tmp_path: Path, name: str, content: bytes, defect: str
) -> None:
    (run / name).write_bytes(content)
    found = drafter_defect(run, FileDigests(tmp_path))
    assert found is not None
    assert found.startswith(defect)
    with pytest.raises(UserError, match="repeat the command that trained this run, and it is exported again"):
        check_drafter(run / "drafter", FileDigests(tmp_path))


def test_figures_that_were_changed_are_not_reported(run: Path) -> None:
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match=r"summary.json cannot be read: No such file.*; restore"):
        check_figures(run)


def test_of_other_drafters_and_of_runs_without_digests_nothing_is_known(run: Path, tmp_path: Path) -> None:
    (run / "finished.json").write_text('{"finished": 1, "summary": {}}')
    (run / "drafter" / "config.json").write_text("{}")
    check_drafter(run / "drafter", FileDigests(tmp_path))
    check_drafter(tmp_path, FileDigests(tmp_path))
