"""Direction of imports between the packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.record_stage_digests import imported_modules

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"prefect", "mlflow", "duckdb"}


def files_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, package
    return found


def packages_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


@pytest.mark.parametrize(
    "package, forbidden",
    [
        ("dflash_core", HEAVY | {"flows", "tasks", "sql"}),
        ("tasks", {"flows"}),
        ("sql", {"flows", "tasks", "dflash_core"}),
    ],
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    wrong = {str(p.relative_to(ROOT)): sorted(packages_of(p) & forbidden) for p in files_of(package)}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("part", ["dflash_core/batching", "dflash_core/data", "dflash_core/model/anchors.py"])
def test_lengths_and_data_need_no_torch(part: str) -> None:
    files = [ROOT / part] if part.endswith(".py") else files_of(part)
    assert [str(p) for p in files if "torch" in packages_of(p)] == []


def test_the_command_line_parses_without_prefect() -> None:
    """`--help` and a user's mistake are answered before anything slow is imported."""
    for name in (
        "flows/cli.py",
        "flows/deployments.py",
        "flows/__init__.py",
        "tasks/files.py",
        "tasks/__init__.py",
    ):
        assert packages_of(ROOT / name) & (HEAVY | {"torch", "transformers"}) == set()
