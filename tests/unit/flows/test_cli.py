"""The command line: parameters, help, one message and exit code 2 for a mistake, environment variables."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime import cli

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("training.epochs=2", {"training": {"epochs": 2}}),
        ('training={"epochs": 2}', {"training": {"epochs": 2}}),
        ("batching.strategy=packed", {"batching": {"strategy": "packed"}}),
        ('batching.strategy="packed"', {"batching": {"strategy": "packed"}}),
        ("data.limit=null", {"data": {"limit": None}}),
        ("target.name=a=b", {"target": {"name": "a=b"}}),
        ("drafter=null", {"drafter": None}),
    ],
)
def test_parse_param(text: str, expected: dict) -> None:
    assert cli.parse_param(text) == expected


@pytest.mark.parametrize("text", ["epochs", "=2", "training.=2", "training={epochs: 2}"])
def test_parse_param_rejects(text: str) -> None:
    with pytest.raises(UserError, match="--param"):
        cli.parse_param(text)


def test_later_parameters_win_key_by_key() -> None:
    given = cli.parse_params(
        ["training.epochs=2", 'training={"seed": 1}', "training.epochs=3", 'data=["a.jsonl"]']
    )
    assert given == {"training": {"epochs": 3, "seed": 1}, "data": {"files": ["a.jsonl"]}}


def run(flow: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"flows.{flow}", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run("train_dflash", "quickstart", "--param", "training.epochs=none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: training.epochs: 'none' is not allowed; allowed: an integer\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []  # nothing written


def test_help_lists_deployments_in_aligned_columns(tmp_path: Path) -> None:
    done = run("train_dflash", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("quickstart", "smollm2", "qwen3-8b", "--param", "training.epochs=2"):
        assert name in done.stdout
    lines = done.stdout.splitlines()
    start = lines.index(f"deployments (parameter sets of {ROOT}/flows/prefect.yaml):") + 1
    table = lines[start : lines.index("", start)]
    names = {line.split()[0] for line in table}
    assert "smollm2-regenerated" in names
    [column] = {len(line) - len(line[2:].split(maxsplit=1)[1]) for line in table}
    assert column == 2 + max(map(len, names)) + 2


def test_a_missing_name_is_a_mistake(tmp_path: Path) -> None:
    assert run("train_dflash", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("arguments", [["quickstart", "--show"], ["--help"]])
def test_a_reader_that_has_closed_the_pipe_is_no_error(arguments: list[str]) -> None:
    """`--show | head` closes the pipe early; here it is closed before the command starts."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flows.train_dflash", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 0


def test_show_prints_the_resolved_settings(tmp_path: Path) -> None:
    done = run("train_dflash", "quickstart", "--show", "-p", "training.seed=5", cwd=tmp_path)
    shown = json.loads(done.stdout)
    assert shown["training"]["seed"] == 5
    assert shown["target"]["name"] == "smollm2-135m-instruct"
    assert {f.name for f in dataclasses.fields(RunConfig)} <= shown.keys()


def test_environment_of_the_user_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_HOME", "MLFLOW_TRACKING_URI", "DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED"):
        # Set first, so that it is restored afterwards.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "77")
    root = cli.set_environment(str(tmp_path / "runs"))
    assert root == (tmp_path / "runs").resolve()
    assert os.environ["PREFECT_HOME"] == str(root / "prefect")
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{root}/mlflow.db"
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] == "77"
    assert os.environ["DO_NOT_TRACK"] == "true"


def test_a_server_that_refuses_us_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401, "Unauthorized")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        done = run("prune", "quickstart", cwd=tmp_path)
        server.shutdown()
    assert done.returncode == 2
    assert done.stderr.startswith("error: PREFECT_API_AUTH_STRING: it is not set, or the server of PREFECT")
    assert done.stderr.count("\n") == 1
