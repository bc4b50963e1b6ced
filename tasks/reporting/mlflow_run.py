"""MLflow: one flat run per training, written in batches, continued on resume, never left RUNNING.

Points are buffered and sent by `log_batch` every 50 steps or 5 seconds, which is 30 to 100 times faster than
one call a metric. On resume each metric continues after its last recorded step, so no step has two points. A
tracking server that is away never stops a training: points wait, and the oldest are dropped, counted and
    reported, above `MAX_WAITING`.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from tasks.reporting.mlflow_client import log, open_client, run_exists, tracking_uri
from tasks.storage.process_notes import is_gone, this_process

FLUSH_STEPS, FLUSH_SECONDS = 50, 15.0
BATCH_LIMIT = 1000  # metrics MLflow takes in one call
MAX_WAITING = 200_000


def git_commit() -> str:
    """Commit of the code that runs, with `-dirty` when it was changed; `unknown` outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match", ""],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"


def comparable_params(config: RunConfig) -> dict[str, Any]:
    """The few settings by which runs are compared; run.json, an artifact, has them all."""
    return {
        "strategy": config.batching.strategy,
        "num_buckets": config.batching.num_buckets,
        "token_budget": config.batching.token_budget,
        "tokens_per_step": config.batching.tokens_per_step,
        "block_size": config.drafter.block_size,
        "num_layers": config.drafter.num_layers,
        "num_captured_layers": config.drafter.num_captured_layers,
        "num_anchors": config.objective.num_anchors,
        "labels": config.objective.labels,
        "weighting": config.objective.weighting,
        "lr": config.optimizer.lr,
        "epochs": config.training.epochs,
        "seed": config.training.seed,
        "target": Path(config.target.name).name,
    }


def run_tags(config: RunConfig, dataset_digest: str, run_key: str, flow_run_id: str) -> dict[str, str]:
    """What groups and finds runs in MLflow."""
    tags = {
        "strategy": config.batching.strategy,
        "stage": "train",
        "deployment": config.deployment,
        "data_digest": dataset_digest,
        "run_key": run_key,
        "git_commit": git_commit(),
        "prefect.flow_run_id": flow_run_id,
    }
    return tags | ({"experiment_group": config.tracking.group} if config.tracking.group else {})


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line of metrics.jsonl."""
    return {
        key: value
        for key, value in line.items()
        if isinstance(value, int | float) and key not in ("step", "time_ms")
    }


@dataclass
class Tracker:
    """Metrics of one training on their way to one MLflow run."""

    client: Any
    run_id: str
    experiment_id: str
    marker: Path  # says, while it exists, that this run must still be closed
    _waiting: list[Any] = field(default_factory=list)
    _last_step: dict[str, int] = field(default_factory=dict)
    _steps_since_flush: int = 0
    _flushed_at: float = field(default_factory=time.monotonic)
    _resumed: bool = False
    _dropped: int = 0
    _monitor: Any = None
    _closed: bool = False

    @classmethod
    def start(
        cls,
        config: RunConfig,
        run_dir: Path,
        *,
        name: str,
        params: dict[str, Any],
        tags: dict[str, str],
        dataset: dict[str, Any],
        owner: str,
    ) -> Tracker:
        """Opens the MLflow run of a run directory: the one it had, else a new one.

        Args:
            params: written once, when the run is created.
            tags: written each time.
            dataset: `name`, `digest`, `files`, `profile`; written with the params.
            owner: id of the flow run, for `close_runs_of_flow`.
        """
        close_abandoned_runs(config.storage_root)
        client, experiment_id = open_client(config)
        recorded, run_id = run_dir / "mlflow.json", None
        with suppress(OSError, json.JSONDecodeError, KeyError):
            run_id = json.loads(recorded.read_text(encoding="utf-8"))["run_id"]
        resumed = run_id is not None and run_exists(client, run_id)
        if not resumed:
            run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
            recorded.write_text(json.dumps({"run_id": run_id, "experiment_id": experiment_id}) + "\n")
            _log_params(client, run_id, params)
            _log_dataset(client, run_id, dataset)
        else:
            client.update_run(run_id, status="RUNNING")
            for key, value in tags.items():
                client.set_tag(run_id, key, value)
        marker = open_marker(config.storage_root, owner)
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_marker(marker, uri=tracking_uri(config), run_id=str(run_id))
        tracker = cls(
            client=client,
            run_id=str(run_id),
            experiment_id=str(experiment_id),
            marker=marker,
            _resumed=resumed,
        )
        if config.tracking.system_metrics:
            tracker._start_monitor(tracking_uri(config))
        return tracker

    def _start_monitor(self, uri: str) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=self._resumed, tracking_uri=uri)
        self._monitor.start()

    def log(self, metrics: dict[str, float], step: int, time_ms: int) -> None:
        """Buffers one step's metrics; values that are not finite are left out (the loop counts them)."""
        from mlflow.entities import Metric

        for key, value in metrics.items():
            if not math.isfinite(value) or step <= self._last(key):
                continue
            self._waiting.append(Metric(key, float(value), time_ms, step))
            self._last_step[key] = step
        self._steps_since_flush += 1
        if self._steps_since_flush >= FLUSH_STEPS or time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def catch_up(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Sends what metrics.jsonl has and MLflow has not, for a run that goes on: a process that was killed took
        its buffer along.
        """
        if not self._resumed:
            return
        try:
            for line in lines:
                self.log(scalars(line), line["step"], line["time_ms"])
            self.flush()
        except Exception as error:  # the tracking server's troubles are not the training's
            log.warning("points of the steps before could not be sent again: %s", error)

    def _last(self, key: str) -> int:
        """Last step recorded of a metric; asked of MLflow once, and only for a run that was continued."""
        if key not in self._last_step:
            known = self.client.get_metric_history(self.run_id, key) if self._resumed else []
            self._last_step[key] = max((m.step for m in known), default=-1)
        return self._last_step[key]

    def flush(self) -> None:
        """Sends what waits. A failure to send keeps it for the next time."""
        self._steps_since_flush, self._flushed_at = 0, time.monotonic()
        try:
            while self._waiting:
                self.client.log_batch(self.run_id, metrics=self._waiting[:BATCH_LIMIT])
                del self._waiting[:BATCH_LIMIT]
        except Exception as error:  # the tracking server's troubles are not the training's
            log.warning("MLflow did not take %d points, will try again: %s", len(self._waiting), error)
            excess = len(self._waiting) - MAX_WAITING
            if excess > 0:
                del self._waiting[:excess]
                self._dropped += excess

    def close(self, status: str) -> None:
        """Sends the rest and ends the run as FINISHED, FAILED or KILLED; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None
        self.flush()
        if self._dropped:
            log.warning("%d MLflow points were dropped; metrics.jsonl has them all", self._dropped)
        try:
            self.client.set_terminated(self.run_id, status=status)
            self.marker.unlink(missing_ok=True)
        except Exception as error:  # the next training closes it
            log.warning("MLflow run %s could not be closed as %s: %s", self.run_id, status, error)
            with suppress(OSError, json.JSONDecodeError):
                write_marker(self.marker, **(json.loads(self.marker.read_text()) | {"status": status}))


def _log_params(client: Any, run_id: str, params: dict[str, Any]) -> None:
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, str(value)[:6000]) for key, value in params.items()])


def _log_dataset(client: Any, run_id: str, dataset: dict[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    logged = Dataset(
        name=dataset["name"],
        digest=dataset["digest"][:36],  # as many as MLflow takes
        source_type="local",
        source=json.dumps({"files": dataset["files"]}),
        profile=json.dumps(dataset["profile"]),
    )
    client.log_inputs(run_id, [DatasetInput(logged, [InputTag("mlflow.data.context", "training")])])


def open_marker(storage_root: str | Path, owner: str) -> Path:
    """File that exists while a flow run has an MLflow run open."""
    return Path(storage_root).resolve() / "open-runs" / f"{owner}.json"


def write_marker(marker: Path, *, uri: str, run_id: str, status: str | None = None, **_: Any) -> None:
    """Notes an open run, the process that has it open, and the status it should have got."""
    described = {"uri": uri, "run_id": run_id, "status": status, **this_process()}
    marker.write_text(json.dumps(described))


def close_runs_of_flow(flow: Any, flow_run: Any, state: Any) -> None:
    """State hook: the MLflow run of a flow run that ended early becomes KILLED (cancelled) or FAILED."""
    del flow
    storage_root = (flow_run.parameters or {}).get("storage_root") or RunConfig().storage_root
    marker = open_marker(storage_root, str(flow_run.id))
    killed = state.is_cancelled() or state.is_cancelling() or state.is_crashed()
    if marker.exists():
        _close_marked(marker, "KILLED" if killed else "FAILED")


def close_abandoned_runs(storage_root: str | Path) -> None:
    """Closes the runs of this machine's processes that are gone, as far as their tracking servers answer."""
    for marker in open_marker(storage_root, "any").parent.glob("*.json"):
        with suppress(OSError, json.JSONDecodeError, KeyError):
            left = json.loads(marker.read_text(encoding="utf-8"))
            if is_gone(left):
                _close_marked(marker, "KILLED")


def _close_marked(marker: Path, status: str) -> None:
    import mlflow

    left = json.loads(marker.read_text(encoding="utf-8"))
    try:
        mlflow.MlflowClient(left["uri"]).set_terminated(left["run_id"], status=left.get("status") or status)
    except Exception as error:  # a server that is away: another time
        log.warning("MLflow run %s could not be closed: %s", left["run_id"], error)
    else:
        marker.unlink(missing_ok=True)
