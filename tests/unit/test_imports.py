"""Who may import whom, and: a stage's code does not change without its version."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("stage_digests.json")
HEAVY = {"prefect", "mlflow", "duckdb"}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


def module_file(name: str) -> Path | None:
    path = ROOT / Path(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def closure(sources: tuple[str, ...]) -> set[Path]:
    """The files behind modules of dflash_core and all they import from there, settings (which are in the key)
    apart.
    """
    waiting, found = list(sources), set()
    while waiting:
        name = waiting.pop()
        path = module_file(name)
        if path is None or path in found or name.startswith("dflash_core.config"):
            continue
        found.add(path)
        waiting += [m for m in imported_modules(path) if m.startswith("dflash_core")]
    return found


def code_digest(sources: tuple[str, ...]) -> str:
    """Digest of the code without docstrings, comment lines and blank lines; the same on every Python."""
    hasher = hashlib.blake2b(digest_size=8)
    for path in sorted(closure(sources)):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    for number in range(body[0].lineno - 1, body[0].end_lineno or 0):
                        lines[number] = ""
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        hasher.update("\n".join([path.relative_to(ROOT).as_posix(), *code]).encode())
    return hasher.hexdigest()


def current() -> dict[str, dict[str, object]]:
    import tasks.advice
    import tasks.buckets
    import tasks.evaluate
    import tasks.ingest
    import tasks.length_profile
    import tasks.plans
    import tasks.regenerate
    import tasks.target  # noqa: F401
    from tasks.stages import STAGES

    return {
        name: {"version": s.version, "code": code_digest(s.sources)} for name, s in sorted(STAGES.items())
    }


def test_stage_versions_follow_their_code() -> None:
    recorded, now = json.loads(RECORDED.read_text(encoding="utf-8")), current()
    assert recorded.keys() == now.keys()
    for name, found in now.items():
        before = recorded[name]
        if found["code"] != before["code"]:
            assert found["version"] != before["version"], (
                f"stage {name}: the code behind it changed and its version did not. Raise `version` of the "
                f"stage in tasks/ when equal inputs could now give other outputs; then run "
                "`python -m tests.unit.test_imports`"
            )
        assert found == before, (
            f"stage {name}: run `python -m tests.unit.test_imports` to record its new version"
        )


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(current(), indent=1) + "\n", encoding="utf-8")
    sys.exit(0)
