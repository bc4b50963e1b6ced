"""The MLflow run of a training: one flat run, written in batches, continued on resume, never left RUNNING.

Points are buffered and sent by `log_batch` every 50 steps or 15 seconds, which is 30 to 100 times faster than
one call per metric. On resume each metric continues after its last recorded step, so no step has two points.

An outage of the tracking server never stops a training: points wait in memory. Above `MAX_WAITING` the oldest
are dropped, counted and reported; metrics.jsonl has them all. Where the outage lasts at the end, the run is
not finished: the next command sends the rest and closes it.

While a run is open, a marker file names it and its process. The next training, or the flow's own state hook,
closes a run whose process ended without closing it.
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
from dflash_core.files import write_json
from dflash_core.processes import is_gone, this_process
from tasks.reporting.mlflow_client import (
    log,
    open_client,
    record_run,
    recorded_run,
    tracking_errors,
    tracking_uri,
)

FLUSH_STEPS, FLUSH_SECONDS = 50, 15.0
# Number of metrics that MLflow accepts in one call.
BATCH_LIMIT = 1000
# Characters that MLflow accepts in the value of a parameter, and in the digest of a data set.
PARAM_LIMIT, DIGEST_LIMIT = 6000, 36
MAX_WAITING = 200_000
# Files of a data set that MLflow shows, and characters of a name: together below MLflow's limit of 65,535.
SHOWN_FILES, SHOWN_CHARACTERS = 100, 255


def git_commit() -> str:
    """Return the commit of this code, with `-dirty` when it was changed; `unknown` outside a checkout."""
    here = Path(__file__).resolve()
    # An installed package may lie inside the checkout of another project, whose commit says nothing about it.
    is_ours = ["ls-files", "--error-unmatch", here.name]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--match", ""]
    answer = ""
    try:
        for arguments in (is_ours, describe):
            done = subprocess.run(
                ["git", *arguments], cwd=here.parent, capture_output=True, text=True, timeout=10, check=True
            )
            answer = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer or "unknown"


def comparable_params(config: RunConfig) -> dict[str, Any]:
    """Return the few settings by which runs are compared; the artifact run.json has them all."""
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
    """Return the tags by which runs are grouped and found in MLflow."""
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
    """Return the metrics in a line of metrics.jsonl."""
    return {
        key: value
        for key, value in line.items()
        if isinstance(value, int | float) and key not in ("step", "time_ms")
    }


@dataclass
class Tracker:
    """The MLflow run of one training: buffers its metrics, sends them in batches and closes the run."""

    client: Any
    run_id: str
    experiment_id: str
    # File that exists until the run is closed.
    marker: Path
    is_resumed: bool = False
    _waiting: list[Any] = field(default_factory=list)
    _last_step: dict[str, int] = field(default_factory=dict)
    _steps_since_flush: int = 0
    _flushed_at: float = field(default_factory=time.monotonic)
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
        """Open the MLflow run of a run directory: the one it had, else a new one.

        Args:
            config: names the tracking server and the experiment.
            run_dir: directory whose mlflow.json names the run.
            name: name of a new run.
            params: written once, when the run is created.
            tags: written each time.
            dataset: `name`, `digest`, `files`, `profile`; written with the params.
            owner: id of the flow run, for `close_runs_of_flow`.
        """
        close_crashed_runs(config.storage_root)
        client, experiment_id = open_client(config)
        with tracking_errors(tracking_uri(config)):
            run_id = recorded_run(client, run_dir)
            is_resumed = run_id is not None
            if run_id is None:
                run_id = str(client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)
                record_run(run_dir, run_id, experiment_id)
                _log_params(client, run_id, params)
                _log_dataset(client, run_id, dataset)
            else:
                client.update_run(run_id, status="RUNNING")
                for key, value in tags.items():
                    client.set_tag(run_id, key, value)
        marker = open_marker(config.storage_root, owner)
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_marker(marker, uri=tracking_uri(config), run_id=run_id)
        tracker = cls(
            client=client,
            run_id=run_id,
            experiment_id=str(experiment_id),
            marker=marker,
            is_resumed=is_resumed,
        )
        if config.tracking.system_metrics:
            tracker._start_monitor(tracking_uri(config))
        return tracker

    def _start_monitor(self, uri: str) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
        self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=self.is_resumed, tracking_uri=uri)
        self._monitor.start()

    def log(self, metrics: dict[str, float], step: int, time_ms: int) -> None:
        """Buffer one step's metrics; values that are not finite are left out (the loop counts them)."""
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
        """Send the points of metrics.jsonl that MLflow lacks: the buffer of a process that was killed."""
        try:
            for line in lines:
                self.log(scalars(line), line["step"], line["time_ms"])
            self.flush()
        # A failure of the tracking server must not end the training; the same holds below.
        except Exception as error:
            log.warning("points of the steps before could not be sent again: %s", error)

    def _last(self, key: str) -> int:
        """Return the last recorded step of a metric, or -1; MLflow is asked once, for a resumed run only."""
        if key not in self._last_step:
            history = self.client.get_metric_history(self.run_id, key) if self.is_resumed else []
            self._last_step[key] = max((m.step for m in history), default=-1)
        return self._last_step[key]

    def flush(self) -> None:
        """Send the buffered points; those that could not be sent stay for the next time."""
        self._steps_since_flush, self._flushed_at = 0, time.monotonic()
        try:
            while self._waiting:
                self.client.log_batch(self.run_id, metrics=self._waiting[:BATCH_LIMIT])
                del self._waiting[:BATCH_LIMIT]
        except Exception as error:
            log.warning("MLflow did not accept %d points, will try again: %s", len(self._waiting), error)
            excess = len(self._waiting) - MAX_WAITING
            if excess > 0:
                del self._waiting[:excess]
                self._dropped += excess

    def close(self, status: str) -> bool:
        """Send the rest and end the run as FINISHED, FAILED or KILLED; a second call does nothing.

        Returns:
            Whether MLflow has taken everything.
        """
        if self._closed:
            return True
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
        # The next training closes it.
        except Exception as error:
            log.warning("MLflow run %s could not be closed as %s: %s", self.run_id, status, error)
            with suppress(OSError, json.JSONDecodeError):
                marked = json.loads(self.marker.read_text(encoding="utf-8"))
                write_json(self.marker, marked | {"status": status})
            return False
        return not self._waiting


def _log_params(client: Any, run_id: str, params: dict[str, Any]) -> None:
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(key, str(value)[:PARAM_LIMIT]) for key, value in params.items()])


def _log_dataset(client: Any, run_id: str, dataset: dict[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    logged = Dataset(
        name=dataset["name"],
        digest=dataset["digest"][:DIGEST_LIMIT],
        source_type="local",
        source=json.dumps(_shown_files(dataset["files"])),
        profile=json.dumps(dataset["profile"]),
    )
    client.log_inputs(run_id, [DatasetInput(logged, [InputTag("mlflow.data.context", "training")])])


def _shown_files(files: list[str]) -> dict[str, Any]:
    """Return the first files of a data set and the number of all, since MLflow limits the length."""
    return {"files": [name[:SHOWN_CHARACTERS] for name in files[:SHOWN_FILES]], "num_files": len(files)}


def open_marker(storage_root: str | Path, owner: str) -> Path:
    """Return the file that exists while a flow run has an MLflow run open."""
    return Path(storage_root).resolve() / "open-runs" / f"{owner}.json"


def write_marker(marker: Path, *, uri: str, run_id: str, status: str | None = None, **_: Any) -> None:
    """Record an open run, its process, and the status with which it should have been closed.

    The database of the storage root is recorded as null, since the root may be moved.
    """
    address = None if uri == _own_database(marker) else uri
    write_json(marker, {"uri": address, "run_id": run_id, "status": status, **this_process()})


def _own_database(marker: Path) -> str:
    """Return the address of the MLflow database in the storage root of a marker."""
    return f"sqlite:///{marker.resolve().parents[1] / 'mlflow.db'}"


def close_runs_of_flow(flow: Any, flow_run: Any, state: Any) -> None:
    """Close the MLflow run of a flow run that ended early, as KILLED or FAILED; a state hook."""
    del flow
    storage_root = (flow_run.parameters or {}).get("storage_root") or RunConfig().storage_root
    marker = open_marker(storage_root, str(flow_run.id))
    is_killed = state.is_cancelled() or state.is_cancelling() or state.is_crashed()
    if marker.exists():
        close_marked(marker, "KILLED" if is_killed else "FAILED")


def close_crashed_runs(storage_root: str | Path) -> None:
    """Close the runs of processes of this machine that have ended, where their tracking servers answer."""
    for marker in open_marker(storage_root, "any").parent.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            marked = json.loads(marker.read_text(encoding="utf-8"))
            # One with a status could not be closed at its end; its process may have gone on.
            if marked.get("status") or is_gone(marked):
                close_marked(marker, "KILLED")


def close_marked(marker: Path, status: str) -> None:
    """Close the run of a marker with the recorded status, else with `status`; then remove the marker."""
    import mlflow

    marked = json.loads(marker.read_text(encoding="utf-8"))
    try:
        client = mlflow.MlflowClient(marked["uri"] or _own_database(marker))
        client.set_terminated(marked["run_id"], status=marked.get("status") or status)
    # The server is unreachable: the marker stays, and the next training tries again.
    except Exception as error:
        log.warning("MLflow run %s could not be closed: %s", marked["run_id"], error)
    else:
        marker.unlink(missing_ok=True)
