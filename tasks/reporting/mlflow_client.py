"""TODO."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.errors import UserError

LOCAL_UI = "http://127.0.0.1:5000"  # of `make ui`


log = logging.getLogger("prefect.train_dflash.tracking")


def tracking_uri(config: RunConfig) -> str:
    """Where runs are recorded: the setting, else the environment, else sqlite under the storage root."""
    root = Path(config.storage_root).resolve()
    return config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def open_client(config: RunConfig) -> tuple[Any, str]:
    """An MLflow client and the id of the experiment, both created if missing.

    The first use of a sqlite database creates its tables; a file lock lets one process do that at a time.

    Raises:
        UserError: the tracking server cannot be reached.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    root, uri = Path(config.storage_root).resolve(), tracking_uri(config)
    root.mkdir(parents=True, exist_ok=True)
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with (root / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = mlflow.MlflowClient(uri)
        try:
            experiment = client.get_experiment_by_name(config.tracking.experiment)
            if experiment is not None:
                return client, experiment.experiment_id
            artifacts = (root / "mlflow-artifacts").as_uri() if uri.startswith("sqlite:") else None
            return client, client.create_experiment(config.tracking.experiment, artifact_location=artifacts)
        except MlflowException as error:
            raise UserError(f"tracking.uri: {uri!r} cannot be used: {str(error).splitlines()[0]}") from error


def run_url(config: RunConfig, experiment_id: str, run_id: str) -> str:
    """The run's page: of the tracking server, or of the one that `make ui` starts."""
    uri = tracking_uri(config)
    server = uri.rstrip("/") if uri.startswith("http") else LOCAL_UI
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}"


def log_summary(
    config: RunConfig,
    run_id: str,
    *,
    metrics: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    artifacts: Iterable[tuple[Path, str | None]] = (),
) -> None:
    """Adds summary metrics, tags and files (a file or a directory, and where to) to a run that may have
    ended.
    """
    from mlflow.entities import Metric, RunTag

    client, _ = open_client(config)
    now = int(time.time() * 1000)
    points = [
        Metric(k, float(v), now, 0) for k, v in (metrics or {}).items() if v is not None and math.isfinite(v)
    ]
    client.log_batch(run_id, metrics=points, tags=[RunTag(k, v) for k, v in (tags or {}).items()])
    for path, where in artifacts:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), where)
        elif path.exists():
            client.log_artifact(run_id, str(path), where)


def run_of_directory(config: RunConfig, directory: Path, name: str) -> str:
    """The MLflow run that a directory's mlflow.json names; where there is none, a new one, ended and recorded."""
    client, experiment_id = open_client(config)
    recorded = directory / "mlflow.json"
    with suppress(OSError, json.JSONDecodeError, KeyError):
        run_id = str(json.loads(recorded.read_text(encoding="utf-8"))["run_id"])
        if run_exists(client, run_id):
            return run_id
    run_id = client.create_run(experiment_id, run_name=name).info.run_id
    client.set_terminated(run_id, status="FINISHED")
    recorded.write_text(json.dumps({"run_id": run_id, "experiment_id": experiment_id}) + "\n")
    return str(run_id)


def register_drafter(config: RunConfig, run_id: str, model_name: str, tags: dict[str, str]) -> int:
    """Makes the run's artifact `drafter/` a version of a registered model, with the alias `current`.

    Returns:
        The version number; the one this run already has, if it has one.
    """
    from mlflow.exceptions import MlflowException

    client, _ = open_client(config)
    with suppress(MlflowException):
        client.create_registered_model(
            model_name, description="DFlash drafter: config.json and model.safetensors"
        )
    for version in client.search_model_versions(f"name = '{model_name}'"):
        if version.run_id == run_id:
            for key, value in tags.items():
                client.set_model_version_tag(model_name, version.version, key, value)
            return int(version.version)
    version = client.create_model_version(
        model_name, source=f"runs:/{run_id}/drafter", run_id=run_id, tags=tags
    )
    client.set_registered_model_alias(model_name, "current", version.version)
    return int(version.version)


def registered_run_directories(config: RunConfig) -> set[Path]:
    """Run directories whose drafter an alias of a registered model points to."""
    database = Path(config.storage_root).resolve() / "mlflow.db"
    if tracking_uri(config).startswith("sqlite:") and not database.exists():
        return set()
    client, _ = open_client(config)
    aliased = {
        client.get_model_version(model.name, version).run_id
        for model in client.search_registered_models()
        for version in model.aliases.values()
    }
    found = set()
    for recorded in Path(config.storage_root).resolve().glob("*/*/mlflow.json"):
        if json.loads(recorded.read_text(encoding="utf-8"))["run_id"] in aliased:
            found.add(recorded.parent.resolve())
    return found


def run_exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException:
        return False
