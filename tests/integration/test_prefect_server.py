"""A real server, pool and worker on loopback: run, cancel, rerun, as `prefect` commands."""

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

from tests.integration.flow_inputs import BASE
from tests.integration.operations import ROOT, Operations, end_group, free_port, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Iterator[Operations]:
    with Operations(tmp_path_factory.mktemp("operations"), tiny_target_dir) as place:
        yield place


OUTAGE_SECONDS = 60.0
LONG = {**BASE["training"], "epochs": 200, "checkpoint_every_steps": 5}


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
    wait_until(lambda: list(operations.runs.glob("quickstart/*/checkpoints/step-*[0-9]")), 180)
    assert operations.training_processes()
    operations.prefect("flow-run", "cancel", flow_run)
    operations.wait_for(flow_run, 60, "CANCELLED")
    wait_until(lambda: not operations.training_processes(), 60)
    assert mlflow_status(operations) == ["KILLED"]
    again = operations.run(training={**LONG, "checkpoint_every_steps": 50})  # where it saves decides nothing
    wait_until(lambda: "resuming from" in (operations.path / "worker.log").read_text(), 180)
    operations.prefect("flow-run", "cancel", again)
    operations.wait_for(again, 60, "CANCELLED")
    wait_until(lambda: not operations.training_processes(), 60)


def test_a_worker_killed_while_training_leaves_no_orphan(operations: Operations) -> None:
    flow_run = operations.run(training={**LONG, "seed": 1})
    wait_until(lambda: len(list(operations.runs.glob("quickstart/*/checkpoints/step-*[0-9]"))) > 2, 180)
    assert operations.worker is not None
    everything = [operations.worker, *psutil.Process(operations.worker.pid).children(recursive=True)]
    for process in everything:  # the machine of the worker dies: worker, flow and launcher at once
        process.kill()
    operations.worker.wait()
    wait_until(lambda: not operations.training_processes(), 60)
    assert operations.state(flow_run) == "RUNNING"  # nobody has told the server
    operations.start_worker()
    assert operations.state(flow_run) == "CRASHED"
    assert "RUNNING" not in mlflow_status(operations)
    done = operations.run()  # the pool of one is free again
    operations.wait_for(done, 240, "COMPLETED")
    report = json.loads((operations.runs / "quickstart" / "latest" / "report.json").read_text())
    assert report["train"]["steps"] > 0


def test_a_second_run_has_little_to_do(operations: Operations) -> None:
    done = operations.run()
    operations.wait_for(done, 120, "COMPLETED")
    assert (operations.path / "worker.log").read_text().count("is finished and up to date, skipped") == 1


def test_the_prefect_server_away_for_a_while_stops_no_training(operations: Operations) -> None:
    flow_run = operations.run(training={**LONG, "seed": 2, "epochs": 60})
    wait_until(lambda: len(operations.training_processes()) > 1, 180)
    before = set(operations.runs.glob("quickstart/*/summary.json"))
    end_group(operations.server)
    time.sleep(OUTAGE_SECONDS)
    operations.start_server()
    operations.wait_for(flow_run, 300, "COMPLETED", "CRASHED", "FAILED")
    wait_until(lambda: set(operations.runs.glob("quickstart/*/summary.json")) - before, 120)
    wait_until(lambda: not operations.training_processes(), 60)
    again = operations.run(training={**LONG, "seed": 2, "epochs": 60})
    operations.wait_for(again, 240, "COMPLETED")


def test_the_mlflow_server_away_for_a_while_loses_and_doubles_nothing(operations: Operations) -> None:
    port = free_port()
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
    environment = operations.environment | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    uri = f"http://127.0.0.1:{port}"

    def start() -> subprocess.Popen[bytes]:
        with (operations.path / "mlflow.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

        def answers() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
                return True
            return False

        wait_until(answers, 120)
        return process

    server = start()
    try:
        known = set(operations.runs.glob("quickstart/*/metrics.jsonl"))
        training = {**LONG, "seed": 3}
        flow_run = operations.run(training=training, tracking={"uri": uri, "system_metrics": False})
        wait_until(lambda: set(operations.runs.glob("quickstart/*/metrics.jsonl")) - known, 180)
        [metrics] = set(operations.runs.glob("quickstart/*/metrics.jsonl")) - known
        wait_until(lambda: metrics.read_text().count("train/loss") > 10, 60)
        end_group(server)
        done_before = metrics.read_text().count("train/loss")
        time.sleep(OUTAGE_SECONDS)
        assert metrics.read_text().count("train/loss") > done_before  # training went on
        server = start()
        operations.wait_for(flow_run, 400, "COMPLETED")
        steps = json.loads((metrics.parent / "summary.json").read_text())["steps"]
        assert metric_steps(uri, metrics.parent) == list(range(1, steps + 1))
    finally:
        end_group(server)
