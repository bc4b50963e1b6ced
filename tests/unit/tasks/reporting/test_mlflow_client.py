"""MLflow's database in a storage root that was moved, copied or damaged."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from tasks.reporting import mlflow_client
from tasks.reporting.mlflow_client import adopt_artifacts, prepare_database, record_run, recorded_run


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return RunConfig(storage_root=str(tmp_path))


def test_artifacts_are_found_at_the_new_place(config: RunConfig, tmp_path: Path) -> None:
    """Addresses of other experiments stay; those of an old root that is a prefix of another one as well."""
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    connection.execute("CREATE TABLE experiments (artifact_location TEXT)")
    connection.execute("CREATE TABLE runs (artifact_uri TEXT)")
    old, other = "file:///old_%/mlflow-artifacts", "mlflow-artifacts:/1"
    connection.executemany("INSERT INTO experiments VALUES (?)", [(old,), (other,), ("file:///x",)])
    uris = [f"{old}/r1/artifacts", f"{other}/r2/artifacts", "file:///old_x/mlflow-artifacts/r3/artifacts"]
    connection.executemany("INSERT INTO runs VALUES (?)", [(uri,) for uri in uris])
    connection.commit()
    for _ in range(2):
        adopt_artifacts(config)
        new = f"file://{tmp_path}/mlflow-artifacts"
        locations = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        assert locations == [(new,), (other,), ("file:///x",)]
        runs = connection.execute("SELECT artifact_uri FROM runs").fetchall()
        assert runs == [(f"{new}/r1/artifacts",), (uris[1],), (uris[2],)]
    connection.close()


def test_damage_is_named_before_the_flow_starts(config: RunConfig, tmp_path: Path) -> None:
    adopt_artifacts(config)
    (tmp_path / "mlflow.db").touch()
    adopt_artifacts(config)
    (tmp_path / "mlflow.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(UserError, match=r"mlflow\.db cannot be used: .*; restore it from a copy, or move it"):
        adopt_artifacts(config)


@pytest.mark.parametrize("code", ["RESOURCE_DOES_NOT_EXIST", "TEMPORARILY_UNAVAILABLE"])
def test_a_run_is_lost_only_if_mlflow_says_so(tmp_path: Path, code: str) -> None:
    """A database that is locked must not lead to a second run of the same training."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ErrorCode

    class Client:
        def get_run(self, run_id: str) -> None:
            raise MlflowException(f"run {run_id}", ErrorCode.Value(code))

    client: Any = Client()
    record_run(tmp_path, "r", "0")
    if code == "RESOURCE_DOES_NOT_EXIST":
        assert recorded_run(client, tmp_path) is None
    else:
        with pytest.raises(MlflowException, match="run r"):
            recorded_run(client, tmp_path)


def test_the_tables_of_a_server_are_made_under_the_lock_of_the_flows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow and `make ui` that start on a new storage root at once would both create them, and fail."""
    held: list[str] = []
    monkeypatch.setattr(mlflow_client.locks, "lock", lambda file, *, wait: held.append(Path(file.name).name))
    prepare_database(tmp_path)
    assert held == [".mlflow.lock"]
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    (tmp_path / "mlflow.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(UserError, match=r"mlflow\.db cannot be used: .*; restore it from a copy"):
        prepare_database(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_id": []}', "[" * 100_000])
def test_a_damaged_note_of_the_run_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "mlflow.json").write_text(text)
    assert mlflow_client.recorded_run(None, tmp_path) is None
