"""The command line: what is given lies over the named set, mistakes are one message and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime import cli, deployments

ROOT = Path(__file__).resolve().parents[2]

EXAMPLE = """
definitions:
  base: &base
    data: {limit: 600, max_length: 768}
    training: {epochs: 4, seed: 7}
deployments:
  - {name: small, entrypoint: flows.train_dflash.train_dflash, parameters: *base}
  - {name: small, entrypoint: flows.rebucket.rebucket, parameters: *base}
"""


@pytest.fixture
def prefect_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "prefect.yaml"
    path.write_text(EXAMPLE)
    return path


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
def test_parse_param_refuses(text: str) -> None:
    with pytest.raises(UserError, match="--param"):
        cli.parse_param(text)


def test_later_parameters_win_key_by_key() -> None:
    given = cli.parse_params(
        ["training.epochs=2", 'training={"seed": 1}', "training.epochs=3", 'data=["a.jsonl"]']
    )
    assert given == {"training": {"epochs": 3, "seed": 1}, "data": {"files": ["a.jsonl"]}}


def test_given_over_named_over_defaults(prefect_yaml: Path) -> None:
    given = {"training": {"epochs": 2}, "data": ["x.jsonl"]}
    config, _ = deployments.resolve("train-dflash", "small", given, prefect_yaml)
    assert (config.training.epochs, config.training.seed) == (2, 7)  # given, named
    assert config.data.files == ("x.jsonl",)
    assert (config.data.limit, config.data.max_length) == (600, 768)  # the rest of the section stays
    assert config.optimizer == RunConfig().optimizer  # defaults
    assert config.deployment == "small"


def test_a_section_left_out_is_none(prefect_yaml: Path) -> None:
    """Prefect passes None for a parameter that nobody set."""
    config, _ = deployments.resolve(
        "train-dflash", "small", {"training": None, "tracking": None}, prefect_yaml
    )
    assert config.training.epochs == 4


@pytest.mark.parametrize(
    "given, message",
    [
        ({"trainin": {}}, "trainin: unknown parameter of train-dflash; allowed: batching, data, "),
        ({"training": {"epoch": 2}}, "training.epoch: unknown setting; allowed: "),
        ({"training": {"epochs": "two"}}, "training.epochs: 'two' is not allowed; allowed: an integer"),
        ({"training": {"epochs": True}}, "training.epochs: True is not allowed; allowed: an integer"),
        ({"training": {"epochs": 0}}, "training.epochs: 0 is not allowed; allowed: >= 1"),
        ({"training": 3}, "training: 3 is not a mapping of settings"),
        (
            {"batching": {"strategy": "best"}},
            "batching.strategy: 'best' is not allowed; allowed: sorted, sorted_fresh",
        ),
        ({"data": [1]}, "data.files[0]: 1 is not allowed; allowed: a string"),
        ({"strategies": ["packed"]}, "strategies: unknown parameter of train-dflash"),
    ],
)
def test_mistakes_name_field_value_and_what_is_allowed(prefect_yaml: Path, given: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        deployments.resolve("train-dflash", "small", given, prefect_yaml)
    assert str(error.value).startswith(message)


def test_unknown_deployment_lists_those_that_exist(prefect_yaml: Path) -> None:
    with pytest.raises(
        UserError, match=r"train-dflash: no deployment 'big' in prefect.yaml; there are: small"
    ):
        deployments.resolve("train-dflash", "big", {}, prefect_yaml)


@pytest.mark.parametrize(
    "options", [{"strategies": []}, {"strategies": ["packed", "packed"]}, {"seeds": [-1]}]
)
def test_compare_options_are_checked(options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        deployments.resolve("compare-strategies", None, options)


def test_every_deployment_of_the_project_resolves() -> None:
    document = yaml.safe_load(deployments.PREFECT_YAML.read_text())
    seen = 0
    for flow_name, info in deployments.FLOWS.items():
        named = deployments.deployments(flow_name)
        assert "quickstart" in named, flow_name
        for name in named:
            config, options = deployments.resolve(flow_name, name, {})
            assert config.drafter.mask_token_id is not None
            assert isinstance(options, info.options)
            seen += 1
    assert seen == len(document["deployments"])  # no entry has an entry point that no flow has
    pools = {entry["work_pool"]["name"] for entry in document["deployments"]}
    assert pools == {"dflash-train", "dflash-data"}


def run(flow: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"flows.{flow}", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run("train_dflash", "quickstart", "--param", "training.epochs=none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: training.epochs: 'none' is not allowed; allowed: an integer\n"
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []  # nothing written


def test_help_lists_deployments(tmp_path: Path) -> None:
    done = run("train_dflash", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("quickstart", "smollm2", "qwen3-8b", "--param", "training.epochs=2"):
        assert name in done.stdout
    assert run("train_dflash", cwd=tmp_path).returncode == 2  # no name


def test_show_prints_the_resolved_settings(tmp_path: Path) -> None:
    done = run("train_dflash", "quickstart", "--show", "-p", "training.seed=5", cwd=tmp_path)
    shown = json.loads(done.stdout)
    assert shown["training"]["seed"] == 5
    assert shown["target"]["name"] == "smollm2-135m-instruct"
    assert {f.name for f in dataclasses.fields(RunConfig)} <= shown.keys()


def test_environment_of_the_user_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_HOME", "MLFLOW_TRACKING_URI", "DO_NOT_TRACK", "PREFECT_SERVER_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "x")  # so that it is restored afterwards
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


@pytest.mark.parametrize(
    "files, name",
    [
        ([], "stdlib"),
        (["chats/a.jsonl.zst"], "a"),
        (["data/chats/*.jsonl"], "chats"),
        (["data/chats/**/*.jsonl", "b.jsonl", "c"], "chats-and-2-more"),
        (["*.jsonl"], "data"),
    ],
)
def test_a_word_for_the_data(files: list[str], name: str) -> None:
    assert deployments.data_name(files) == name
