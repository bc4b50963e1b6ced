"""The commands as a user runs them: fresh processes, real training and decoding on the tiny target."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.support.flow_runs import SMALL_SETTINGS, flow_command, flow_environment, write_rows
from benchmarks.support.prefect_services import processes_that_name, wait_until
from tests.support.mlflow_points import check_one_point_per_step

PLAN_FIGURES = {"padding_efficiency", "num_microbatches", "mixing_microbatch", "mixing_step"}
ALL_STRATEGIES = {"sorted", "sorted_fresh", "random", "bucketed", "packed"}


CANARY = "Canary-5f3a9b1c7d"
# Every process of the commands writes the host of each connection and look-up to the file $CONNECTIONS.
AUDIT = """
import os, sys
def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments
        host = address[0] if isinstance(address, tuple) else "local"
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(f"{host!r}\\n")
if "CONNECTIONS" in os.environ:
    sys.addaudithook(note)
"""


class WorkingDirectory:
    """A working directory with data and the settings of a small run."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        write_rows(path / "a.jsonl", 60, seed=0)

    def arguments(self, flow: str, **sections: Any) -> list[str]:
        settings = {
            **SMALL_SETTINGS,
            "target": {"name": str(self.target)},
            "data": {"files": ["a.jsonl"], "min_validation_samples": 4, "limit": None},
            "tracking": {"system_metrics": False, "uri": "env:TRACKING"},
            "training": {**SMALL_SETTINGS.get("training", {}), "on_failure": "env:FAILURE_HOOK"},
        }
        return flow_command(flow, "quickstart", settings, sections)

    def environment(self) -> dict[str, str]:
        (self.path / "audit").mkdir(exist_ok=True)
        (self.path / "audit" / "sitecustomize.py").write_text(AUDIT)
        given = flow_environment()
        return given | {
            "PYTHONPATH": f"{self.path / 'audit'}{os.pathsep}{given['PYTHONPATH']}",
            "CONNECTIONS": str(self.path / "connections.txt"),
            "OMP_NUM_THREADS": "1",
            "TRACKING": self.mlflow_uri(),
            "FAILURE_HOOK": f"curl -H 'Authorization: Bearer {CANARY}' http://127.0.0.1:9/",
            "OPENAI_API_KEY": f"{CANARY}\n",
            "HF_TOKEN": f"hf_{CANARY}",
        }

    def run(self, flow: str = "train_dflash", **sections: Any) -> subprocess.CompletedProcess:
        command = self.arguments(flow, **sections)
        return subprocess.run(
            command, cwd=self.path, env=self.environment(), capture_output=True, text=True, timeout=1800
        )

    def mlflow_uri(self) -> str:
        return f"sqlite:///{self.path}/runs/mlflow.db"

    def latest(self) -> Path:
        return self.path / "runs" / "quickstart" / "latest"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> WorkingDirectory:
    return WorkingDirectory(tmp_path_factory.mktemp("command"), tiny_target_dir)


@pytest.fixture(scope="module")
def trained(directory: WorkingDirectory) -> WorkingDirectory:
    """The working directory after one complete run."""
    done = directory.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acceptance length" in done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    return directory


REPORTED = {
    "dataset": ["num_samples", "num_tokens", "num_rejected", "max_length", "median_length"],
    "train": ["steps", "samples", "tokens", "tokens_per_second", "loss_first", "loss_last"],
    "validation": ["loss_first", "loss_last"],
    "evaluation": [
        "acceptance_length",
        "acceptance_interval",
        "prompts",
        "lossless",
        "one_at_a_time",
        "protocol",
    ],
}


def test_the_report_holds_the_figures_of_every_part(trained: WorkingDirectory) -> None:
    report = json.loads((trained.latest() / "report.json").read_text())
    assert report["deployment"] == "quickstart"
    assert report["strategy"] == "packed"
    for section, names in REPORTED.items():
        assert [n for n in names if report[section].get(n) is None] == [], section
    assert set(report["plans"]) == ALL_STRATEGIES
    for figures in report["plans"].values():
        assert figures.keys() >= PLAN_FIGURES
        assert 0 <= figures["repeated_pair_share"] <= 1
    assert report["plans"]["sorted"]["repeated_pair_share"] == 1.0  # its composition never changes
    assert report["edges"][0] == 0
    assert report["edges"][-1] >= report["dataset"]["max_length"]
    assert report["train"]["loss_last"] < report["train"]["loss_first"]
    assert report["evaluation"]["lossless"] is True
    run = trained.latest().resolve()
    assert os.readlink(trained.latest()) == run.name
    assert report["run_key"].startswith(run.name)
    for name in ("report.md", "metrics.jsonl", "run.json", "drafter/model.safetensors", "plots/loss.png"):
        assert (run / name).is_file(), name
    assert [p for p in trained.path.rglob(".*") if "partial" in p.name or p.name.startswith(".removed")] == []


def test_mlflow_has_one_finished_run_with_one_point_per_step(trained: WorkingDirectory) -> None:
    import mlflow

    report = json.loads((trained.latest() / "report.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{trained.path}/runs/mlflow.db")
    run = client.get_run(report["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["strategy"] == "packed"
    assert run.data.tags["stage"] == "train"
    for tag in ("data_digest", "git_commit", "prefect.flow_run_id"):
        assert run.data.tags[tag], tag
    check_one_point_per_step(trained.mlflow_uri(), trained.latest())
    expected = pytest.approx(report["evaluation"]["acceptance_length"])
    assert run.data.metrics["final/acceptance_length"] == expected
    names = {a.path for a in client.list_artifacts(report["mlflow_run_id"])}
    assert {"report.md", "report.json", "plots", "drafter"} <= names
    version = client.get_model_version_by_alias("dflash-quickstart", "current")
    assert version.run_id == report["mlflow_run_id"]
    assert version.tags["run_key"] == report["run_key"]
    [logged] = run.inputs.dataset_inputs
    assert logged.dataset.digest == run.data.tags["data_digest"]
    assert json.loads(logged.dataset.profile)["num_samples"] == report["dataset"]["num_samples"]
    assert run.info.run_name.startswith("packed-quickstart-a-")
    assert not list((trained.path / "runs" / "open-runs").glob("*.json"))


def test_a_second_run_skips_everything_and_reports_it(trained: WorkingDirectory) -> None:
    before = {p: p.stat().st_mtime_ns for p in (trained.path / "runs" / "store").rglob("*") if p.is_file()}
    done = trained.run()
    assert done.returncode == 0
    assert "is finished and up to date, skipped" in done.stderr
    # target and its check, file, profile, edges, ten plans, evaluate
    assert done.stderr.count("Finished in state Cached") == 16
    assert "validation at step 0" not in done.stdout
    after = {p: p.stat().st_mtime_ns for p in (trained.path / "runs" / "store").rglob("*") if p.is_file()}
    assert after == before


def test_a_missing_file_is_reported_before_anything_is_written(tmp_path: Path, tiny_target_dir: Path) -> None:
    directory = WorkingDirectory(tmp_path, tiny_target_dir)
    done = directory.run(data={"files": ["missing.jsonl"]})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: data.files: 'missing.jsonl' has no file")
    assert done.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "audit"]


@pytest.mark.long
def test_a_mistake_found_inside_the_flow_is_one_message(tmp_path: Path, tiny_target_dir: Path) -> None:
    directory = WorkingDirectory(tmp_path, tiny_target_dir)
    done = directory.run(drafter={**SMALL_SETTINGS["drafter"], "target_layer_ids": [1, 9]})
    assert done.returncode == 2
    [message] = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert message.startswith("error: drafter.target_layer_ids")
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "runs" / "quickstart" / "latest").exists()


def start(directory: WorkingDirectory, command: list[str]) -> subprocess.Popen[str]:
    """Start a command as the leader of a session, so that a signal reaches all of its processes."""
    return subprocess.Popen(
        command,
        cwd=directory.path,
        env=directory.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
def test_interrupt_ends_every_process_and_the_next_run_resumes(tmp_path: Path, tiny_target_dir: Path) -> None:
    directory = WorkingDirectory(tmp_path, tiny_target_dir)
    training = {**SMALL_SETTINGS["training"], "epochs": 20, "checkpoint_every_steps": 5}
    command = directory.arguments("train_dflash", training=training)
    child = start(directory, command)
    wait_until(lambda: list(directory.path.glob("runs/quickstart/*/checkpoints/step-*[0-9]")), 900)
    started = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("stopped; the next run resumes")
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(started, timeout=300)
    assert alive == []
    assert processes_that_name(directory.path) == []
    done = directory.run(training=training)
    assert done.returncode == 0, done.stderr
    assert "training: resuming" in done.stderr
    assert "resuming from" in done.stdout
    check_one_point_per_step(directory.mlflow_uri(), directory.latest())


# The stage by the first word of a task's label, where the two differ; "" is no stage or is counted otherwise.
STAGE_OF_LABEL = {"length": "profile", "bucket": "edges", "train": "", "report": ""}


def executed(done: subprocess.CompletedProcess) -> list[str]:
    """Return the stages that a command ran, with their counts: ["edges", "plan 2", "train"]."""
    assert done.returncode == 0, done.stdout + done.stderr
    labels = re.findall(r"Task run '([^']*)' - Finished in state Completed", done.stderr)
    first_words = (label.split()[0] for label in labels)
    counts = Counter(STAGE_OF_LABEL.get(word, word) for word in first_words)
    counts.pop("", None)
    if any(f"training: {status} run" in done.stderr for status in ("new", "resuming")):
        counts["train"] = 1
    return sorted(name if count == 1 else f"{name} {count}" for name, count in counts.items())


@pytest.mark.long
def test_what_reruns_in_fresh_processes(tmp_path: Path, tiny_target_dir: Path) -> None:
    """The table of stages and changes, one process per row, with real training and decoding."""
    target = tmp_path / "target"
    shutil.copytree(tiny_target_dir, target)
    directory = WorkingDirectory(tmp_path, target)
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "a.jsonl").rename(data / "a.jsonl")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def area"}\n')
    common: dict[str, Any] = {"data": {"files": ["data"], "min_validation_samples": 4, "limit": None}}

    def ran(**sections: Any) -> list[str]:
        return executed(directory.run(**{**common, **sections}))

    assert ran() == ["edges", "evaluate", "ingest", "plan 10", "profile", "target", "train"]
    os.utime(data / "a.jsonl", ns=(1, 1))
    assert ran() == []
    assert ran(training={"checkpoint_every_steps": 3, "log_every": 2, "max_draft_slots": 128}) == []
    assert ran(batching={"num_buckets": 3}) == ["edges", "plan 2"]
    assert ran(batching={"strategy": "bucketed"}) == ["evaluate", "train"]
    assert ran(batching={"strategy": "bucketed", "num_buckets": 3}) == ["evaluate", "train"]
    assert ran(batching={"token_budget": 600}) == ["edges", "evaluate", "plan 10", "train"]
    assert ran(training={"seed": 1}) == ["evaluate", "plan 10", "train"]
    assert ran(optimizer={"lr": 0.003}) == ["evaluate", "train"]
    assert ran(evaluation={"prompts": ["prompts.jsonl"]}) == ["evaluate"]
    shutil.rmtree(tmp_path / "runs" / "store" / "edges")
    assert ran() == ["edges"]
    write_rows(data / "b.jsonl", 30, seed=1)
    assert ran() == ["edges", "evaluate", "ingest", "plan 10", "profile", "train"]
    config = target / "generation_config.json"
    config.write_text(config.read_text().replace("{", '{"a_note": "another target",', 1))
    assert ran() == ["evaluate", "target", "train"]
    tokenizer = target / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("{", '{"a_note": "another tokenizer",', 1))
    assert ran() == ["evaluate", "ingest 2", "target", "train"]
    # A stage that is killed half-way leaves a temporary directory, which the next run removes.
    write_rows(data / "c.jsonl", 30_000, seed=2)
    store = tmp_path / "runs" / "store" / "ingest"
    child = start(directory, directory.arguments("rebucket", **common))
    while not list(store.glob(".*")):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert len([p for p in store.iterdir() if not p.name.startswith(".")]) == 4
    assert list(store.glob(".*"))
    done = directory.run("rebucket", **common)
    assert executed(done)[:2] == ["edges", "ingest"]
    assert not list(store.glob(".*"))


def test_every_connection_of_a_run_stays_on_this_machine(trained: WorkingDirectory) -> None:
    hosts = set((trained.path / "connections.txt").read_text().split("\n")) - {""}
    own = ["127.0.0.1", "::1", "localhost", "local", "", "0.0.0.0", socket.gethostname(), socket.getfqdn()]
    assert "'127.0.0.1'" in hosts
    assert hosts - {repr(host) for host in own} - {repr(host.encode()) for host in own} - {"None"} == set()


class _Echo(http.server.BaseHTTPRequestHandler):
    """An endpoint that refuses every key and repeats it."""

    def do_POST(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(f"wrong key: {self.headers['Authorization']}".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_no_secret_is_kept_in_a_file(trained: WorkingDirectory) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        failed = trained.run(deployment="echo", regenerate={"enabled": True, "base_url": url})
        server.shutdown()
    refused = trained.run(deployment="echo", tracking={"uri": f"http://me:{CANARY}@127.0.0.1:9"})
    assert failed.returncode == 2, failed.stderr
    assert "answers 401 wrong key: Bearer ***" in failed.stderr
    assert refused.returncode == 2, refused.stderr
    assert "tracking.uri: 'http://***@127.0.0.1:9' holds a secret" in refused.stderr
    assert CANARY not in failed.stdout + failed.stderr + refused.stdout + refused.stderr
    files = [path for path in (trained.path / "runs").rglob("*") if path.is_file()]
    assert {"prefect.db", "mlflow.db", "run.json"} <= {path.name for path in files}
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []
    assert (trained.path / "runs").stat().st_mode & 0o777 == 0o700
