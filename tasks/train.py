"""Task `train`: one run from its plans to its last step in a child process, its metrics recorded in MLflow.

A run whose key is known resumes, or is skipped when it is finished. The key holds everything that decides the
result (`tasks.storage.run_directory`), so the task does not use Prefect's cache.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from dflash_core.files import write_json
from dflash_core.redaction import redacted_exceptions
from tasks.plans import plan_file
from tasks.report import dataset_figures
from tasks.reporting import mlflow_client
from tasks.reporting import mlflow_run as tracking
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage import locks
from tasks.storage import run_directory as runs
from tasks.storage.input_files import data_name
from tasks.storage.live_runs import mark_used
from tasks.storage.pointers import (
    Dataset,
    PlanPointer,
    ProfilePointer,
    TargetPointer,
    TrainedRun,
    target_directory,
)
from tasks.storage.run_directory import RunDirectory

# Seconds between updates of the progress artifact.
PROGRESS_SECONDS = 15.0


def _can_resume(_task: Any, _task_run: Any, state: Any) -> bool:
    """Return whether another try can resume the run: after the death of a rank or machine, or a stall."""
    return getattr(state.data, "again", False)


def train_run(
    config: RunConfig,
    target: TargetPointer,
    dataset: Dataset,
    profile: ProfilePointer,
    epochs: Sequence[PlanPointer],
    *,
    refresh: bool,
    label: str | None = None,
) -> TrainedRun:
    """Train to the end, resume, or skip a finished run; `epochs` holds one plan per epoch."""
    used = epochs[: config.training.epochs]
    num_steps = sum(int(plan["metrics"]["num_steps"]) for plan in used)
    inputs = {
        "shards": dataset.shards,
        "plans": [str(plan_file(config, plan)) for plan in used],
        "target": str(target_directory(config, target)),
        "dataset_digest": dataset.digest,
        "plan_digests": [plan["plan_digest"] for plan in used],
        "target_fingerprint": target["fingerprint"],
        "total_steps": min(num_steps, config.training.max_steps or num_steps),
        "dataset": {
            "name": data_name(config.data.files),
            "files": sorted(shard["source"] for shard in dataset.pointers),
            "profile": dataset_figures(profile["stats"], dataset.pointers, num_repeats=dataset.num_repeats),
        },
    }
    label = label or f"train {config.batching.strategy}"
    return train(config, inputs, label=label, refresh=refresh, after=[target, *used])


@task(
    name="train",
    task_run_name="{label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_can_resume,
)
@redacted_exceptions()
def train(
    config: RunConfig,
    inputs: dict[str, Any],
    *,
    label: str = "train",
    refresh: bool = False,
    after: Sequence[Any] = (),
) -> TrainedRun:
    """Train the run that the settings and the inputs name, to its end.

    Args:
        config: settings of the run.
        inputs: `shards`, `plans`, `target` (paths), `dataset_digest`, `plan_digests`, `target_fingerprint`,
            `total_steps`, `dataset` (`name`, `files` and `profile` for MLflow).
        label: name of the task run.
        refresh: train again although the run is finished.
        after: pointers that this task builds on, for Prefect's graph.
    """
    del label, after
    logger = get_run_logger()
    fields = runs.decisive_fields(
        config,
        dataset_digest=inputs["dataset_digest"],
        plan_digests=inputs["plan_digests"],
        target_fingerprint=inputs["target_fingerprint"],
    )
    run = runs.find_run(config, fields)
    if config.training.init_from is not None:
        # A run or its drafter.
        for directory in (Path(config.training.init_from), Path(config.training.init_from).resolve().parent):
            mark_used(directory)
    _log_changes(config, run, logger)
    if run.is_finished and not refresh:
        return _skip(config, run, logger)
    with runs.locked(run.path), _locked_accelerators(config, logger):
        # Another flow may have trained it between the look above and the lock.
        if run.is_finished and not refresh:
            return _skip(config, run, logger)
        # A retry resumes, also where the first try was to train again from the start.
        if refresh and (runtime.task_run.run_count or 1) == 1:
            runs.empty(run)
        is_resumed = run.has_checkpoint
        previous = runs.point_latest(run.path)
        kind, strategy = "resuming" if is_resumed else "new", config.batching.strategy
        steps = inputs["total_steps"]
        if config.training.max_minutes is not None:
            steps = f"as many of {steps} as fit into {config.training.max_minutes:g} minutes"
        logger.info("training: %s run %s, %s steps, strategy %s", kind, run.path, steps, strategy)
        try:
            _train(config, run, inputs)
        except UserError:
            runs.discard(run, previous)
            raise
    return _trained_run(run, "resumed" if is_resumed else "trained")


def _skip(config: RunConfig, run: RunDirectory, logger: Any) -> TrainedRun:
    """Return a finished run, as the latest one and as one that this flow uses."""
    logger.info("training: run %s is finished and up to date, skipped", run.path.name)
    mark_used(run.path)
    runs.point_latest(run.path)
    skipped = _trained_run(run, "skipped")
    _link_mlflow(config, skipped["experiment_id"], skipped["mlflow_run_id"])
    return skipped


def _train(config: RunConfig, run: RunDirectory, inputs: dict[str, Any]) -> None:
    """Launch the training and record it; the MLflow run is closed however the training ends."""
    from dflash_core.launch.launcher import launch, stop

    total_steps = inputs["total_steps"]
    tracker = _open_tracker(config, run, inputs)
    paths = {"run": str(run.path)} | {name: inputs[name] for name in ("target", "shards", "plans")}
    remarks = runs.write_run(run, config, paths, total_steps=total_steps, mlflow_run_id=tracker.run_id)
    for remark in remarks:
        get_run_logger().warning("training: run %s %s", run.path.name, remark)
    _link_mlflow(config, tracker.experiment_id, tracker.run_id)
    progress = _ProgressArtifact(config.deployment, total_steps)
    status = "FAILED"

    def on_metrics(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            tracker.log(tracking.scalars(line), line["step"], line["time_ms"])
            # Of a run with training.max_minutes.
            progress.total = int(line.get("train/total_steps", progress.total))
        progress.update(lines[-1]["step"])

    try:
        tracker.catch_up(runs.read_metrics(run.path))
        summary = launch(run.path, config, on_metrics)
        # A finished run is never opened again, so its MLflow run has ended before.
        tracker.close("FINISHED")
        write_json(run.path / "finished.json", {"finished": int(time.time()), "summary": summary})
    except Exception:
        raise
    # Ctrl-C, a cancellation.
    except BaseException:
        status = "KILLED"
        # A second signal may have cut the launcher's own stop short.
        with _ignored_signals():
            stop(run.path, None)
            tracker.close(status)
        raise
    finally:
        tracker.close(status)
    progress.update(progress.total)


def _open_tracker(config: RunConfig, run: RunDirectory, inputs: dict[str, Any]) -> tracking.Tracker:
    dataset, flow_run_id = inputs["dataset"], str(runtime.flow_run.id)
    return tracking.Tracker.start(
        config,
        run.path,
        # The strategy comes first: MLflow's charts and tables cut names short.
        name=f"{config.batching.strategy}-{config.deployment}-{dataset['name']}-{run.key[:6]}",
        params=tracking.comparable_params(config),
        tags=tracking.run_tags(config, inputs["dataset_digest"], run.key, flow_run_id),
        dataset=dataset | {"digest": inputs["dataset_digest"]},
        owner=flow_run_id,
    )


def _trained_run(run: RunDirectory, status: str) -> TrainedRun:
    recorded = runs.read_json(run.path / "mlflow.json")
    return {
        "status": status,
        "run_dir": str(run.path),
        "key": run.key,
        "summary": runs.read_json(run.path / "summary.json"),
        "mlflow_run_id": recorded["run_id"],
        "experiment_id": recorded["experiment_id"],
    }


def _log_changes(config: RunConfig, run: RunDirectory, logger: Any) -> None:
    """Log each deciding field in which this run differs from the deployment's latest one."""
    latest = runs.read_run(runs.latest_directory(config))
    if latest is None or latest.get("run_key") == run.key:
        return
    for line in runs.changed_fields(latest["fields"], run.fields):
        logger.info("training: differs from the latest run: %s", line)


def _link_mlflow(config: RunConfig, experiment_id: str, run_id: str) -> None:
    url = mlflow_client.run_url(config, experiment_id, run_id)
    artifacts.link("mlflow", config.deployment, url, f"MLflow run {run_id}")


class _ProgressArtifact:
    """A progress bar in Prefect's UI, updated at most once per `PROGRESS_SECONDS`."""

    def __init__(self, deployment: str, total_steps: int) -> None:
        self.total, self._updated = max(1, total_steps), 0.0
        self._artifact: Any = create_progress_artifact(
            0.0,
            key=f"training-{artifacts.slug(deployment)}",
            description=f"{deployment}: percent of the optimizer steps",
        )

    def update(self, step: int) -> None:
        now = time.monotonic()
        if now - self._updated < PROGRESS_SECONDS and step < self.total:
            return
        self._updated = now
        # A failure of the UI must not end the training.
        with contextlib.suppress(Exception):
            update_progress_artifact(self._artifact, progress=100.0 * step / self.total)


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside; for work that takes a bounded time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)


@contextlib.contextmanager
def _locked_accelerators(config: RunConfig, logger: Any) -> Iterator[None]:
    """Hold the lock of this machine's GPUs: one training at a time, with or without a server."""
    if config.training.device == "cpu" or not list(Path("/dev").glob("nvidia[0-9]*")):
        yield
        return
    # In the user's own directory: in a shared one, others could hold the lock or put a link in its place.
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache") / "train-dflash"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / f"accelerators-{socket.gethostname()}.lock").open("a+") as lock:
        try:
            locks.lock(lock, wait=False)
        except BlockingIOError:
            logger.warning("training: another training holds this machine's GPUs; waiting for it to end")
            locks.lock(lock, wait=True)
        yield
