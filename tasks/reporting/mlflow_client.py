"""MLflow: the connection, summaries of runs that may have ended, and the registry of drafters.

MLflow is imported inside functions, since importing it takes seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig, TrackingConfig
from dflash_core.databases import LOCK_SECONDS, check_database, database_errors
from dflash_core.errors import UserError
from dflash_core.files import write_json
from dflash_core.redaction import redact
from dflash_core.references import secret_value
from tasks.storage import locks

# Address of the server that `make ui` starts.
LOCAL_UI = "http://127.0.0.1:5000"
# Next step where the database is damaged.
REMEDY = (
    "restore it from a copy, or move it away with its -wal and -shm files: MLflow starts anew, while every "
    "run keeps its own report and metrics.jsonl"
)
# Columns of MLflow's database that hold absolute addresses of artifacts.
ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
)

log = logging.getLogger("prefect.train_dflash.tracking")


def tracking_uri(config: RunConfig) -> str:
    """Return the address of the tracking server or database.

    It is the setting, else the environment variable, else a sqlite database under the storage root.
    """
    root = Path(config.storage_root).resolve()
    if config.tracking.uri:
        return secret_value(config.tracking.uri, "tracking.uri")
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


@contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Make one message of what the tracking server or database answers inside.

    Raises:
        UserError: it cannot be reached, or is locked.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise UserError(f"tracking.uri: {uri!r} cannot be used: {str(error).splitlines()[0]}") from error


def prepare_database(root: Path) -> None:
    """Create or update the tables of the database of a storage root, before a server opens it.

    Two processes that do so at once fail, so it is done under the lock that `open_client` takes.

    Raises:
        UserError: the database is damaged, locked, or cannot be written.
    """
    config = RunConfig(storage_root=str(root), tracking=TrackingConfig(uri=f"sqlite:///{root / 'mlflow.db'}"))
    open_client(config)


def open_client(config: RunConfig) -> tuple[Any, str]:
    """Open an MLflow client, and return it with the id of the experiment, which is created if missing.

    The first use of a sqlite database creates its tables; a file lock lets one process at a time do that.

    Raises:
        UserError: the tracking server cannot be reached.
    """
    import mlflow

    root, uri = Path(config.storage_root).resolve(), tracking_uri(config)
    root.mkdir(parents=True, exist_ok=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It prints the traceback of each error that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    with (root / ".mlflow.lock").open("w") as lock:
        locks.lock(lock, wait=True)
        artifacts = None
        if uri.startswith("sqlite:///"):
            check_database(Path(uri.removeprefix("sqlite:///")), REMEDY)
            artifacts = (root / "mlflow-artifacts").as_uri()
        with tracking_errors(uri):
            client = mlflow.MlflowClient(uri)
            experiment = client.get_experiment_by_name(config.tracking.experiment)
            if experiment is not None:
                return client, experiment.experiment_id
            return client, client.create_experiment(config.tracking.experiment, artifact_location=artifacts)


def adopt_artifacts(config: RunConfig) -> None:
    """Let the database of a storage root that was moved or copied name the artifacts at its new place.

    MLflow records absolute addresses; those that this project wrote end in `/mlflow-artifacts`.

    Raises:
        UserError: the database is damaged, locked, or cannot be written.
    """
    root = Path(config.storage_root).resolve()
    database, artifacts = root / "mlflow.db", (root / "mlflow-artifacts").as_uri()
    if tracking_uri(config) != f"sqlite:///{database}" or not database.exists():
        return
    check_database(database, REMEDY)
    connection = sqlite3.connect(database, timeout=LOCK_SECONDS)
    with database_errors(database, REMEDY), closing(connection), connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            return
        earlier = connection.execute(
            "SELECT DISTINCT artifact_location FROM experiments "
            "WHERE artifact_location LIKE 'file://%/mlflow-artifacts' AND artifact_location <> ?",
            (artifacts,),
        ).fetchall()
        for (address,) in earlier:
            for table, column in ADDRESSES:
                if table in tables:
                    connection.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                        f"WHERE substr({column}, 1, ?) = ?",
                        (artifacts, len(address) + 1, len(address), address),
                    )


def run_url(config: RunConfig, experiment_id: str, run_id: str) -> str:
    """Return the address of the run's page on the tracking server, or on the one that `make ui` starts."""
    uri = tracking_uri(config)
    server = redact(uri).rstrip("/") if uri.startswith("http") else LOCAL_UI
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}"


def log_summary(
    config: RunConfig,
    run_id: str,
    *,
    metrics: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    artifacts: Iterable[tuple[Path, str | None]] = (),
) -> None:
    """Add summary metrics, tags and files to a run that may have ended.

    Args:
        config: names the tracking server.
        run_id: the run.
        metrics: name -> value; values that are None or not finite are left out.
        tags: name -> text.
        artifacts: a file or directory each, and the directory of the run's artifacts that it goes to; None:
            the top.
    """
    from mlflow.entities import Metric, RunTag

    client, _ = open_client(config)
    now = int(time.time() * 1000)
    finite = {k: float(v) for k, v in (metrics or {}).items() if v is not None and math.isfinite(v)}
    client.log_batch(
        run_id,
        metrics=[Metric(key, value, now, 0) for key, value in finite.items()],
        tags=[RunTag(key, value) for key, value in (tags or {}).items()],
    )
    for path, artifact_path in artifacts:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), artifact_path)
        elif path.exists():
            client.log_artifact(run_id, str(path), artifact_path)


def run_of_directory(config: RunConfig, directory: Path, name: str) -> str:
    """Return the run that a directory's mlflow.json names; without one, create an ended run."""
    client, experiment_id = open_client(config)
    run_id = recorded_run(client, directory)
    if run_id is None:
        run_id = str(client.create_run(experiment_id, run_name=name).info.run_id)
        client.set_terminated(run_id, status="FINISHED")
        record_run(directory, run_id, experiment_id)
    return run_id


def recorded_run(client: Any, directory: Path) -> str | None:
    """Return the run that a directory's mlflow.json names, if it exists and is not deleted.

    Raises:
        MlflowException: MLflow cannot say, since its server is away or its database is locked.
    """
    from mlflow.exceptions import MlflowException

    run_id = _run_id_in(directory / "mlflow.json")
    try:
        is_active = run_id is not None and client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run_id if is_active else None


def _run_id_in(path: Path) -> str | None:
    """Return the run that an mlflow.json names; None where it cannot be read."""
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return run_id if isinstance(run_id, str) else None


def record_run(directory: Path, run_id: str, experiment_id: str) -> None:
    """Write mlflow.json, which names the MLflow run of a directory."""
    write_json(directory / "mlflow.json", {"run_id": run_id, "experiment_id": experiment_id})


def register_drafter(config: RunConfig, run_id: str, model_name: str, tags: dict[str, str]) -> int:
    """Register the run's artifact `drafter/` as a version of a model, with the alias `current`.

    A run that already has a version keeps it, with new tags.

    Returns:
        The version number.
    """
    from mlflow.exceptions import MlflowException

    client, _ = open_client(config)
    with suppress(MlflowException):
        description = "DFlash drafter: config.json and model.safetensors"
        client.create_registered_model(model_name, description=description)
    if (known := tag_drafter(config, run_id, model_name, tags)) is not None:
        return known
    version = client.create_model_version(
        model_name, source=f"runs:/{run_id}/drafter", run_id=run_id, tags=tags
    )
    client.set_registered_model_alias(model_name, "current", version.version)
    return int(version.version)


def tag_drafter(config: RunConfig, run_id: str, model_name: str, tags: dict[str, str]) -> int | None:
    """Set tags of the model version of a run, and return its number; None where it has none."""
    client, _ = open_client(config)
    for version in client.search_model_versions(f"name = '{model_name}'"):
        if version.run_id == run_id:
            for key, value in tags.items():
                client.set_model_version_tag(model_name, version.version, key, value)
            return int(version.version)
    return None


def registered_run_directories(config: RunConfig) -> set[Path]:
    """Return the run directories whose drafter an alias of a registered model points to."""
    database = Path(config.storage_root).resolve() / "mlflow.db"
    if tracking_uri(config).startswith("sqlite:") and not database.exists():
        return set()
    client, _ = open_client(config)
    aliased = {
        client.get_model_version(model.name, version).run_id
        for model in client.search_registered_models()
        for version in model.aliases.values()
    }
    directories = set()
    for recorded in Path(config.storage_root).resolve().glob("*/*/mlflow.json"):
        if _run_id_in(recorded) in aliased:
            directories.add(recorded.parent.resolve())
    return directories
