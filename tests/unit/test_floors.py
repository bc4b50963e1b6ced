"""Floors of the house: who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.storage.code_digests import ROOT, imported_modules, module_file

HEAVY = {"prefect", "mlflow", "duckdb"}

# Each floor imports from the floors above it in this list, never from its own or a later one.
FLOORS = [
    {"dflash_core.redaction", "dflash_core.telemetry"},
    # the table of strategies is data that the settings read, so it lies below the room that it describes
    {"dflash_core.errors", "dflash_core.processes", "dflash_core.batching.strategies"},
    {
        "dflash_core.files",
        "dflash_core.databases",
        "dflash_core.anchors",
        "dflash_core.visibility",
        "dflash_core.run_statistics",
    },
    {"dflash_core.references"},
    {"dflash_core.config"},
    {"dflash_core.microbatch"},
    {"dflash_core.data", "dflash_core.batching", "dflash_core.kernels", "dflash_core.launch"},
    {"dflash_core.target"},
    {"dflash_core.drafter"},
    {"dflash_core.objective"},
    {"dflash_core.decoding", "dflash_core.dataflow"},
    {"dflash_core.training", "dflash_core.serving"},
    {"tasks.storage"},
    {"tasks.reporting"},
    {"flows.runtime"},
    {"tasks"},
    {"flows.steps"},
    {"flows"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def files_of(*packages: str) -> list[Path]:
    files = sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))
    assert files, packages
    return files


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def packages_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


def room_of(name: str) -> str | None:
    """The longest entry of FLOORS that a module belongs to."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in HEIGHT), None)


def own_imports(path: Path) -> Iterator[str]:
    """The modules of this project that a file imports."""
    return (
        name for name in imported_modules(path) if module_file(name) and name_of(module_file(name)) == name
    )


def test_every_module_has_a_floor() -> None:
    rootless = [
        name_of(path) for path in files_of("dflash_core", "tasks", "flows") if not room_of(name_of(path))
    ]
    assert rootless == ["dflash_core"]


@pytest.mark.parametrize("path", files_of("dflash_core", "tasks", "flows"), ids=name_of)
def test_imports_go_down_the_floors(path: Path) -> None:
    room = room_of(name_of(path))
    upward = {
        name
        for name in own_imports(path)
        if (other := room_of(name)) is not None
        and room is not None
        and other != room
        and HEIGHT[other] >= HEIGHT[room]
    }
    assert upward == set()


def test_no_circle_of_imports() -> None:
    """No module reaches itself through imports, those inside functions included."""
    edges = {name_of(path): set(own_imports(path)) for path in files_of("dflash_core", "tasks", "flows")}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize(
    "package, forbidden",
    [
        ("dflash_core", HEAVY | {"flows", "tasks", "sql", "benchmarks", "tests"}),
        ("tasks", {"flows", "benchmarks", "tests"}),
        ("flows", {"benchmarks", "tests"}),
        ("sql", {"flows", "tasks", "dflash_core"}),
        ("benchmarks", {"tests"}),
    ],
)
def test_packages_that_a_package_never_imports(package: str, forbidden: set[str]) -> None:
    wrong = {name_of(path): sorted(packages_of(path) & forbidden) for path in files_of(package)}
    assert {name: packages for name, packages in wrong.items() if packages} == {}


@pytest.mark.parametrize("package", ["dflash_core/batching", "dflash_core/data"])
def test_lengths_and_data_need_no_torch(package: str) -> None:
    assert [name_of(path) for path in files_of(package) if "torch" in packages_of(path)] == []


def module_level_imports(path: Path) -> Iterator[str]:
    """The imports at the top level of a file; those inside functions are left out."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_command_line_parses_without_prefect() -> None:
    """`--help` and a user's mistake are answered before anything slow is imported."""
    waiting, reached = ["flows.runtime.cli"], set()
    while waiting:
        name = waiting.pop()
        if name not in reached and (path := module_file(name)):
            reached.add(name)
            waiting += module_level_imports(path)
            packages = {module.split(".")[0] for module in module_level_imports(path)}
            assert packages & (HEAVY | {"torch", "transformers", "numba"}) == set(), name
    assert "dflash_core.config" in reached
