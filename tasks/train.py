"""Task `train`: one run from its plans to its last step in a child process, its metrics on the way to MLflow.

A run whose key is known resumes, or is skipped when it is finished; the key holds everything that decides the
result (`tasks.storage.run_directory`), so the task needs no cache of Prefect's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE

from dflash_core.config import RunConfig, from_dict
from dflash_core.errors import UserError
from dflash_core.files import write_json
from tasks import report
from tasks.reporting import mlflow_client
from tasks.reporting import mlflow_run as tracking
from tasks.reporting import prefect_artifacts as artifacts
from tasks.storage import run_directory as runs

PROGRESS_SECONDS = 15.0  # between updates of the progress artifact


def _may_go_on(_task: Any, _task_run: Any, state: Any) -> bool:
    """A rank or machine that died, a stall: another try goes on from the newest checkpoint. Nothing else is tried
    again.
    """
    return getattr(state.data, "again", False)


@task(
    name="train",
    task_run_name="{label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[5, 30],
    retry_condition_fn=_may_go_on,
)
def train(
    config: dict[str, Any],
    inputs: dict[str, Any],
    *,
    label: str = "train",
    refresh: bool = False,
    after: Sequence[Any] = (),
) -> dict[str, Any]:
    """Trains the run that the settings and the inputs name, to its end.

    Args:
        config: a `RunConfig` as JSON types.
        inputs: `shards`, `plans`, `target` (paths), `dataset_digest`, `plan_digests`, `target_fingerprint`,
            `total_steps`, `dataset` (`name`, `files` and `profile` for MLflow).
        refresh: train again although the run is finished.
        after: pointers this builds on, for Prefect's graph.

    Returns:
        `status` (trained, resumed or skipped), `run_dir` (absolute), `key`, `summary`, `mlflow_run_id`.
    """
    del after
    settings: RunConfig = from_dict(RunConfig, config)
    logger = get_run_logger()
    fields = runs.decisive_fields(
        settings,
        dataset_digest=inputs["dataset_digest"],
        plan_digests=inputs["plan_digests"],
        target_fingerprint=inputs["target_fingerprint"],
    )
    run = runs.find_run(settings, fields)
    _explain(settings, run, logger)
    if run.is_finished and not refresh:
        logger.info("training: run %s is finished and up to date, skipped", run.directory.name)
        runs.point_latest(run.directory)
        done = _pointer(run, "skipped")
        _link(settings, done["experiment_id"], done["mlflow_run_id"])
        return done
    if refresh and run.directory.exists() and (runtime.task_run.run_count or 1) == 1:  # a retry goes on
        shutil.rmtree(run.directory)
    resumed = any((run.directory / "checkpoints").glob("step-*")) if run.directory.exists() else False
    run.directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(run), _accelerators(settings, logger):
        previous = runs.point_latest(run.directory)
        logger.info(
            "training: %s run %s, %d steps, %s",
            "resuming" if resumed else "new",
            run.directory,
            inputs["total_steps"],
            f"strategy {settings.batching.strategy}",
        )
        try:
            _train(settings, run, inputs)
        except UserError:
            runs.discard(run, previous)
            raise
    return _pointer(run, "resumed" if resumed else "trained")


def _train(config: RunConfig, run: runs.Run, inputs: dict[str, Any]) -> None:
    from dflash_core.launch.launcher import launch, stop

    tracker = tracking.Tracker.start(
        config,
        run.directory,
        # the strategy first: MLflow's charts and tables cut names short
        name=f"{config.batching.strategy}-{config.deployment}-{inputs['dataset']['name']}-{run.key[:6]}",
        params=tracking.comparable_params(config),
        tags=tracking.run_tags(config, inputs["dataset_digest"], run.key, str(runtime.flow_run.id)),
        dataset=inputs["dataset"] | {"digest": inputs["dataset_digest"]},
        owner=str(runtime.flow_run.id),
    )
    runs.prepare_directory(
        run,
        config,
        {
            "run": str(run.directory),
            "target": inputs["target"],
            "shards": inputs["shards"],
            "plans": inputs["plans"],
        },
        total_steps=inputs["total_steps"],
        mlflow_run_id=tracker.run_id,
    )
    _link(config, tracker.experiment_id, tracker.run_id)
    progress = _Progress(config.deployment, inputs["total_steps"])
    status = "FAILED"

    def on_metrics(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            tracker.log(tracking.scalars(line), line["step"], line["time_ms"])
        progress.update(lines[-1]["step"])

    try:
        tracker.catch_up(report.read_metrics(run.directory))
        summary = launch(run.directory, config, on_metrics)
        write_json(run.directory / "finished.json", {"finished": int(time.time()), "summary": summary})
        status = "FINISHED"
    except Exception:
        raise
    except BaseException:  # Ctrl-C, a cancellation
        status = "KILLED"
        with _undisturbed():  # a second signal may have cut the launcher's own stop short
            stop(run.directory, None)
            tracker.close(status)
        raise
    finally:
        tracker.close(status)
    progress.update(inputs["total_steps"])


def _pointer(run: runs.Run, status: str) -> dict[str, Any]:
    recorded = json.loads((run.directory / "mlflow.json").read_text(encoding="utf-8"))
    summary = json.loads((run.directory / "summary.json").read_text(encoding="utf-8"))
    return {
        "status": status,
        "run_dir": str(run.directory),
        "key": run.key,
        "summary": summary,
        "mlflow_run_id": recorded["run_id"],
        "experiment_id": recorded["experiment_id"],
    }


def _explain(config: RunConfig, run: runs.Run, logger: Any) -> None:
    """Names each deciding field in which this run differs from the deployment's latest one."""
    latest = runs.read_run(runs.latest_directory(config))
    if latest is None or latest.get("run_key") == run.key:
        return
    for line in runs.differences(latest["fields"], run.fields):
        logger.info("training: differs from the latest run: %s", line)


def _link(config: RunConfig, experiment_id: str, run_id: str) -> None:
    url = mlflow_client.run_url(config, experiment_id, run_id)
    artifacts.link("mlflow", config.deployment, url, f"MLflow run {run_id}")


class _Progress:
    """A progress artifact in Prefect's UI, updated every few seconds at most."""

    def __init__(self, deployment: str, total_steps: int) -> None:
        self.total, self._updated = max(1, total_steps), 0.0
        self._artifact: Any = create_progress_artifact(
            0.0,
            key=f"training-{artifacts.slug(deployment)}",
            description=f"{deployment}: percent of {total_steps} optimizer steps",
        )

    def update(self, step: int) -> None:
        now = time.monotonic()
        if now - self._updated < PROGRESS_SECONDS and step < self.total:
            return
        self._updated = now
        with contextlib.suppress(Exception):  # the UI's troubles are not the training's
            update_progress_artifact(self._artifact, progress=100.0 * step / self.total)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM have no effect inside; what is inside takes a bounded time."""
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
def _exclusive(run: runs.Run) -> Iterator[None]:
    """One process a run directory."""
    with (run.directory / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"run {run.directory} is being trained by process {lock.read().strip() or '?'}; wait for "
                "it or stop it"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextlib.contextmanager
def _accelerators(config: RunConfig, logger: Any) -> Iterator[None]:
    """One training on this machine's GPUs at a time, also for runs that no server knows of."""
    if config.training.device == "cpu" or not list(Path("/dev").glob("nvidia[0-9]*")):
        yield
        return
    with (Path(tempfile.gettempdir()) / f"dflash-accelerators-{os.getuid()}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("training: another training holds this machine's GPUs; waiting for it to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
