"""A path that names an exported drafter, or a run with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.drafter.directory import CONFIG_FILE, WEIGHTS_FILE, drafter_directory
from dflash_core.errors import UserError


@pytest.mark.parametrize("inside", ["", "drafter"])
def test_a_run_or_its_drafter(tmp_path: Path, inside: str) -> None:
    exported = tmp_path / "run" / inside
    exported.mkdir(parents=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (exported / name).touch()
    assert drafter_directory(tmp_path / "run", field="drafter_path") == exported
    assert drafter_directory(exported, field="drafter_path") == exported


def test_a_path_without_a_drafter_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).touch()
    with pytest.raises(
        UserError, match=f"^training.init_from: '{tmp_path}' holds no drafter; allowed: a run"
    ):
        drafter_directory(tmp_path, field="training.init_from")
