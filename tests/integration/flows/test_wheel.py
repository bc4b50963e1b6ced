"""The wheel: what it holds, and its console command outside the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from benchmarks.support.flow_runs import ROOT, SMALL_SETTINGS, without_servers, write_rows

PACKAGES = ("flows", "tasks", "sql", "dflash_core")
DATA_FILES = {".py", ".sql", ".yaml", ".jsonl", ".html"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, without network."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77 builds the wheel")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "tests/support", "benchmarks/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "prefect.yaml"):
        shutil.copy(ROOT / name, copy)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [path] = out.iterdir()
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(directory)
    return directory


@pytest.fixture
def own_project(tmp_path: Path) -> Path:
    """A working directory of a user's own project, with packages that have the names of ours."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the user has such a package too')\n")
    return tmp_path


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_the_wheel_holds_every_package_with_its_data_and_nothing_else(unpacked: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in DATA_FILES
    }
    found = {name for name in files_of(unpacked) if ".dist-info/" not in name}
    assert found == expected
    assert (unpacked / "flows" / "prefect.yaml").read_bytes() == (ROOT / "prefect.yaml").read_bytes()
    assert len(list((unpacked / "sql").glob("*.sql"))) >= 6


def test_the_console_command_runs_from_the_wheel(unpacked: Path, own_project: Path) -> None:
    [metadata] = unpacked.glob("*.dist-info")
    entry_points = importlib.metadata.PathDistribution(metadata).entry_points
    [command] = entry_points.select(group="console_scripts", name="train-dflash")

    def run(*arguments: str) -> str:
        # What pip writes as the command; like a file in a bin directory, it does not import from here.
        script = f"import sys; from {command.module} import {command.attr}; sys.exit({command.attr}())"
        environment = {**os.environ, "PYTHONPATH": str(unpacked)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, *arguments],
            cwd=own_project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    before = files_of(own_project)
    listed = run("--help")
    assert f"deployments in {unpacked}/flows/prefect.yaml" in listed
    assert "deployments: quickstart, smollm2, smollm2-regenerated, qwen3-8b" in listed
    assert run("rebucket", "--help").startswith("usage: train-dflash rebucket [")
    assert json.loads(run("train-dflash", "quickstart", "--show"))["deployment"] == "quickstart"
    assert files_of(own_project) == before


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The scripts of a fresh environment with the wheel; other packages are those of this environment."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    [site_packages] = environment.glob("lib/python*/site-packages")
    # The .pth files of this environment, such as that of an editable install, are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return environment / "bin"


@pytest.mark.long
def test_an_installed_wheel_trains_outside_the_checkout(
    installed: Path, own_project: Path, tiny_target_dir: Path
) -> None:
    write_rows(own_project / "a.jsonl", 60, seed=0)
    settings = {
        **SMALL_SETTINGS,
        "target": {"name": str(tiny_target_dir)},
        "data": {"files": ["a.jsonl"], "min_validation_samples": 4, "limit": None},
        "tracking": {"system_metrics": False},
    }
    given = [text for key, value in settings.items() for text in ("--param", f"{key}={json.dumps(value)}")]
    done = subprocess.run(
        [str(installed / "train-dflash"), "train-dflash", "quickstart", *given],
        cwd=own_project,
        env=without_servers() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acceptance length" in done.stdout
    latest = own_project / "runs" / "quickstart" / "latest"
    assert (latest / "drafter" / "model.safetensors").is_file()
    assert json.loads((latest / "report.json").read_text())["evaluation"]["acceptance_length"] >= 1
