"""A stage's code does not change unnoticed: its digest is recorded with its version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.storage import code_digests
from tasks.storage.code_digests import code_digest, statements_of
from tests.support.record_stage_digests import RECORDED, current

COMMAND = "python -m tests.support.record_stage_digests"


def test_stage_versions_follow_their_code() -> None:
    recorded, now = json.loads(RECORDED.read_text(encoding="utf-8")), current()
    assert recorded.keys() == now.keys()
    for name, stage in now.items():
        assert stage["code"] == recorded[name]["code"], (
            f"stage {name}: the code behind it changed. If equal inputs could now give other outputs, raise "
            f"`version` of the stage in tasks/, or users keep outdated outputs; then run `{COMMAND}`"
        )
        assert stage == recorded[name], (
            f"stage {name}: run `{COMMAND}` to record its version {stage['version']}"
        )


BEFORE = '''"""Doc."""
import os
from a import b


def area(width: int, height: int = 2) -> str:
    """Multiply."""
    import math
    # a comment
    return f"{width * height} {math.pi}"


LIMIT = 3
'''
MOVED = '''"""Another."""
import b

LIMIT = (
    3
)  # the same
'''


def test_moves_imports_docstrings_and_line_breaks_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    (tmp_path / "b.py").write_text(
        'def area(width: int, height: int = 2) -> str:\n    return f"{width * height} {math.pi}"\n'
    )
    before = list(statements_of(tmp_path / "a.py"))
    assert len(before) == 2
    assert before[:1] == list(statements_of(tmp_path / "b.py"))
    (tmp_path / "a.py").write_text(MOVED.replace("(\n    3\n)", "3"))
    assert before[1:] == list(statements_of(tmp_path / "a.py"))


@pytest.mark.parametrize(
    "old, new",
    [("* height", "+ height"), ("LIMIT = 3", "LIMIT = 4"), ("{width *", "{1 *"), ("area(", "size(")],
)
def test_code_counts(tmp_path: Path, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_digests, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(BEFORE)
    before = code_digest(("a",))
    (tmp_path / "a.py").write_text(BEFORE.replace(old, new))
    assert code_digest(("a",)) != before
