"""Remarks on a run that resumes with other versions or other code."""

from __future__ import annotations

import pytest

from tasks.storage import provenance
from tasks.storage.provenance import changed_modules, minor_versions, resume_remarks


def test_a_resume_names_both_versions_and_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "version_of", {"torch": "2.9.1", "numpy": "2.3.0"}.get)
    earlier = {"made_with": {"torch": "2.8.0", "numpy": "2.3.0"}, "code": {"loop.py": "1", "gone.py": "2"}}
    remarks = resume_remarks(earlier, {"code": {"loop.py": "3"}})
    assert "torch 2.8.0, now 2.9.1" in remarks[0]
    assert "numpy" not in remarks[0]
    assert remarks[1].endswith("gone.py, loop.py")
    assert len(remarks) == 3
    same = {"made_with": {"torch": "2.9.1"}, "code": {"loop.py": "3"}}
    assert resume_remarks(same, same) == []
    # A run of an earlier version of this project.
    assert resume_remarks({}, same) == []


def test_many_changed_modules_are_counted() -> None:
    now = {f"{name}.py": "1" for name in "abcdefg"}
    assert changed_modules({}, now) == "a.py, b.py, c.py, d.py, e.py and 2 more"


@pytest.mark.parametrize(
    "version, minor",
    [("2.9.1+cpu", "2.9"), ("5.0.0rc1", "5.0"), ("3", "3"), ("none", "none"), ("0.22.1.dev0", "0.22")],
)
def test_major_and_minor_version(monkeypatch: pytest.MonkeyPatch, version: str, minor: str) -> None:
    monkeypatch.setattr(provenance, "version_of", lambda _: version)
    assert minor_versions(["library"]) == {"library": minor}


def test_training_code_is_recorded_by_module() -> None:
    code = provenance.training_provenance()["code"]
    assert {"dflash_core/training/loop.py", "dflash_core/objective/loss.py"} <= code.keys()
    assert "dflash_core/serving/check.py" not in code
