"""Fixtures of tests that run flows in their own process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.flow_runs import SMALL_SETTINGS, write_rows


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    """A temporary Prefect server that all flows of the test process use."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield


@pytest.fixture
def settings(
    tmp_path: Path, tiny_target_dir: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Settings of a separate run: one data file, the tiny target, an MLflow database under tmp_path."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    write_rows(tmp_path / "data" / "a.jsonl", 60, seed=0)
    return {
        **SMALL_SETTINGS,
        "storage_root": str(tmp_path / "runs"),
        "target": {"name": str(tmp_path / "target")},
        "data": {"files": [str(tmp_path / "data")], "min_validation_samples": 4},
        "tracking": {"system_metrics": False},
    }
