"""A real server, pool and worker on loopback: run, cancel, rerun, outages, as `prefect` commands."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.flow_runs import BASE
from tests.integration.operations import ROOT, Operations, end_group, free_port, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[Operations]:
    with Operations(tmp_path_factory.mktemp("operations"), tiny_target_dir) as place:
        yield place


OUTAGE_SECONDS = 30.0
LONG = {**BASE["training"], "epochs": 40, "checkpoint_every_steps": 10}  # a minute
LONGER = {**LONG, "epochs": 100, "checkpoint_every_steps": 100}  # twice an outage and more


def metric_steps(uri: str, run_dir: Path) -> list[int]:
    """Steps of the training loss that MLflow has, in order; one point a step when nothing came twice."""
    import mlflow

    run = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    return sorted(point.step for point in mlflow.MlflowClient(uri).get_metric_history(run, "train/loss"))


def mlflow_status(place: Operations) -> list[str]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{place.runs}/mlflow.db")
    experiment = client.get_experiment_by_name("train-dflash")
    return [run.info.status for run in client.search_runs([experiment.experiment_id])]


def test_cancelling_ends_every_process_and_the_next_run_resumes(operations: Operations) -> None:
    flow_run = operations.run(training=LONG)
    run_dir = operations.new_run(set(), steps=11)
    assert operations.training_processes()
    operations.prefect("flow-run", "cancel", flow_run)
    operations.wait_for(flow_run, 60, "CANCELLED")
    wait_until(lambda: not operations.training_processes(), 60)
    assert mlflow_status(operations) == ["KILLED"]
    again = operations.run(training={**LONG, "checkpoint_every_steps": 50})  # where it saves decides nothing
    operations.wait_for(again, 240, "COMPLETED")
    assert operations.run_directories() == {run_dir}
    assert "resuming from" in (operations.path / "worker.log").read_text()
    steps = json.loads((run_dir / "summary.json").read_text())["steps"]
    assert metric_steps(f"sqlite:///{operations.runs}/mlflow.db", run_dir) == list(range(1, steps + 1))
    assert mlflow_status(operations) == ["FINISHED"]


def test_a_machine_that_goes_down_leaves_no_orphan_and_no_full_pool(operations: Operations) -> None:
    known = operations.run_directories()
    training = {**LONG, "seed": 1}
    flow_run = operations.run(training=training)
    run_dir = operations.new_run(known, steps=31)
    assert operations.worker is not None
    everything = [operations.worker, *psutil.Process(operations.worker.pid).children(recursive=True)]
    for process in everything:  # worker, flow, launcher and ranks at once
        process.kill()
    operations.worker.wait()
    wait_until(lambda: not operations.training_processes(), 60)
    assert operations.state(flow_run) == "RUNNING"  # nobody has told the server
    operations.start_worker()
    assert operations.state(flow_run) == "CRASHED"
    assert "RUNNING" not in mlflow_status(operations)
    done = operations.run(training=training)  # the pool of one is free again
    operations.wait_for(done, 240, "COMPLETED")
    steps = json.loads((run_dir / "summary.json").read_text())["steps"]
    assert metric_steps(f"sqlite:///{operations.runs}/mlflow.db", run_dir) == list(range(1, steps + 1))


def test_a_second_run_has_little_to_do(operations: Operations) -> None:
    """A run that trained before is skipped, in ten seconds of work."""
    training = {**BASE["training"], "max_steps": 3}
    operations.wait_for(operations.run(training=training), 120, "COMPLETED")
    before = (operations.path / "worker.log").read_text().count("is finished and up to date, skipped")
    done = operations.run(training=training)
    operations.wait_for(done, 120, "COMPLETED")
    after = (operations.path / "worker.log").read_text().count("is finished and up to date, skipped")
    assert after == before + 1
    assert operations.inspect(done)["total_run_time"] < 10


def test_the_prefect_server_away_for_a_while_stops_no_training(operations: Operations) -> None:
    known = operations.run_directories()
    training = {**LONGER, "seed": 2}
    flow_run = operations.run(training=training)
    run_dir = operations.new_run(known, steps=2)
    end_group(operations.server)
    time.sleep(OUTAGE_SECONDS)
    operations.start_server()
    wait_until(lambda: (run_dir / "finished.json").is_file(), 240)
    wait_until(lambda: not operations.training_processes(), 60)
    operations.wait_for(flow_run, 120, "COMPLETED")


def test_the_mlflow_server_away_for_a_while_loses_and_doubles_nothing(operations: Operations) -> None:
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--workers",
        "1",
    ]
    command += ["--backend-store-uri", f"sqlite:///{operations.path}/tracking.db"]
    command += ["--artifacts-destination", str(operations.path / "artifacts")]
    environment = operations.environment | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes that nothing here needs
    }

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
            return True
        return False

    def start() -> subprocess.Popen[bytes]:
        with (operations.path / "mlflow.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(answers, 120)
        return process

    server = start()
    try:
        known = operations.run_directories()
        tracking = {"uri": uri, "system_metrics": False}
        flow_run = operations.run(training={**LONGER, "seed": 3}, tracking=tracking)
        run_dir = operations.new_run(known, steps=11)
        end_group(server)
        metrics = run_dir / "metrics.jsonl"
        done_before = metrics.read_text().count("train/loss")
        time.sleep(OUTAGE_SECONDS)
        assert metrics.read_text().count("train/loss") > done_before  # training went on
        server = start()
        operations.wait_for(flow_run, 300, "COMPLETED")
        steps = json.loads((run_dir / "summary.json").read_text())["steps"]
        assert metric_steps(uri, run_dir) == list(range(1, steps + 1))
    finally:
        end_group(server)
