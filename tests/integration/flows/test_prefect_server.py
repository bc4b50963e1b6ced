"""A real server, pool and worker on loopback: run, cancel, rerun and outages, with `prefect` commands."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.support.flow_runs import SMALL_SETTINGS
from benchmarks.support.prefect_services import (
    PrefectServices,
    count_steps,
    kill_group,
    wait_until,
    wait_until_healthy,
)
from tests.support.mlflow_points import check_one_point_per_step

pytestmark = pytest.mark.long

OUTAGE_SECONDS = 30.0
# A minute on two cores.
LONG = {**SMALL_SETTINGS["training"], "epochs": 40, "checkpoint_every_steps": 10}
# More than twice an outage.
LONGER = {**LONG, "epochs": 100, "checkpoint_every_steps": 100}
SKIPPED = "is finished and up to date, skipped"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[PrefectServices]:
    with PrefectServices(tmp_path_factory.mktemp("services"), tiny_target_dir) as services:
        yield services


def mlflow_uri(services: PrefectServices) -> str:
    return f"sqlite:///{services.runs}/mlflow.db"


def mlflow_statuses(services: PrefectServices) -> list[str]:
    import mlflow

    client = mlflow.MlflowClient(mlflow_uri(services))
    experiment = client.get_experiment_by_name("train-dflash")
    return [run.info.status for run in client.search_runs([experiment.experiment_id])]


def wait_until_processes_end(services: PrefectServices) -> None:
    wait_until(lambda: not services.training_processes(), 300)


def test_cancelling_ends_every_process_and_the_next_run_resumes(services: PrefectServices) -> None:
    flow_run = services.run(training=LONG)
    run_dir = services.new_run(set(), steps=11)
    assert services.training_processes()
    services.prefect("flow-run", "cancel", flow_run)
    services.wait_for(flow_run, "CANCELLED")
    wait_until_processes_end(services)
    assert mlflow_statuses(services) == ["KILLED"]
    # The checkpoint interval is not part of the run key.
    again = services.run(training={**LONG, "checkpoint_every_steps": 50})
    services.wait_for(again, "COMPLETED")
    assert services.run_directories() == {run_dir}
    assert "resuming from" in services.worker_log()
    check_one_point_per_step(mlflow_uri(services), run_dir)
    assert mlflow_statuses(services) == ["FINISHED"]


def test_a_machine_crash_leaves_no_orphan_and_no_full_pool(services: PrefectServices) -> None:
    known = services.run_directories()
    training = {**LONG, "seed": 1}
    flow_run = services.run(training=training)
    run_dir = services.new_run(known, steps=31)
    assert services.worker is not None
    # Worker, flow, launcher and ranks die at once, so nobody reports it to the server.
    for process in [services.worker, *psutil.Process(services.worker.pid).children(recursive=True)]:
        process.kill()
    services.worker.wait()
    wait_until_processes_end(services)
    assert services.state(flow_run) == "RUNNING"
    services.start_worker()
    assert services.state(flow_run) == "CRASHED"
    assert "RUNNING" not in mlflow_statuses(services)
    # The pool has one slot, which is free again.
    again = services.run(training=training)
    services.wait_for(again, "COMPLETED")
    check_one_point_per_step(mlflow_uri(services), run_dir)


def test_a_second_run_has_little_to_do(services: PrefectServices) -> None:
    """A run that was trained before is skipped, and every stage is up to date."""
    training = {**SMALL_SETTINGS["training"], "max_steps": 3}
    services.wait_for(services.run(training=training), "COMPLETED")
    skipped, cached = (services.worker_log().count(text) for text in (SKIPPED, "Finished in state Cached"))
    services.wait_for(services.run(training=training), "COMPLETED")
    assert services.worker_log().count(SKIPPED) == skipped + 1
    # target, its check, file, profile, edges, ten plans, evaluate
    assert services.worker_log().count("Finished in state Cached") == cached + 16


def test_a_request_for_the_code_of_a_model_fails(services: PrefectServices) -> None:
    marker = services.path / "executed"
    target = {"name": str(services.target), "trust_remote_code": True}
    for section in ({"target": target}, {"training": {**LONG, "on_failure": f"touch {marker}"}}):
        services.wait_for(services.run(**section), "FAILED")
    log = services.worker_log()
    assert "target.trust_remote_code: True is not allowed in a run request" in log
    assert f"training.on_failure: 'touch {marker}' is not allowed in a run request" in log
    assert not marker.exists()


def test_an_outage_of_the_prefect_server_stops_no_training(services: PrefectServices) -> None:
    known = services.run_directories()
    flow_run = services.run(training={**LONGER, "seed": 2})
    run_dir = services.new_run(known, steps=2)
    kill_group(services.server)
    time.sleep(OUTAGE_SECONDS)
    services.start_server()
    wait_until(lambda: (run_dir / "finished.json").is_file(), 900)
    wait_until_processes_end(services)
    services.wait_for(flow_run, "COMPLETED")


def test_an_outage_of_the_mlflow_server_loses_and_doubles_no_metric(services: PrefectServices) -> None:
    uri = services.mlflow_uri
    command = ["flows.runtime.mlflow_server", "--port", uri.rpartition(":")[2], "--workers", "1"]
    command += ["--storage-root", str(services.path / "tracking")]

    def start() -> subprocess.Popen[bytes]:
        process = services.start("mlflow.log", *command)
        wait_until_healthy(uri)
        return process

    server = start()
    try:
        known = services.run_directories()
        tracking = {"uri": uri, "system_metrics": False}
        flow_run = services.run(training={**LONGER, "seed": 3}, tracking=tracking)
        run_dir = services.new_run(known, steps=11)
        kill_group(server)
        steps_before = count_steps(run_dir)
        time.sleep(OUTAGE_SECONDS)
        # Training continues while the server is down.
        wait_until(lambda: count_steps(run_dir) > steps_before, 600)
        server = start()
        services.wait_for(flow_run, "COMPLETED")
        check_one_point_per_step(uri, run_dir)
    finally:
        kill_group(server)
