"""Deployments: given parameters override the named set, and it the defaults; mistakes are one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime import deployments

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


def test_given_overrides_named_overrides_defaults(prefect_yaml: Path) -> None:
    given = {"training": {"epochs": 2}, "data": ["x.jsonl"]}
    config, _ = deployments.resolve("train-dflash", "small", given, prefect_yaml)
    assert config.training.epochs == 2  # given
    assert config.training.seed == 7  # named
    assert config.data.files == ("x.jsonl",)
    # The rest of the section stays.
    assert config.data.limit == 600
    assert config.data.max_length == 768
    assert config.optimizer == RunConfig().optimizer  # defaults
    assert config.deployment == "small"


def test_a_section_that_is_none_is_left_out(prefect_yaml: Path) -> None:
    """Prefect passes None for a parameter that was not set."""
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
    message = f"train-dflash: no deployment 'big' in {prefect_yaml}; there are: small"
    with pytest.raises(UserError, match=message):
        deployments.resolve("train-dflash", "big", {}, prefect_yaml)


@pytest.mark.parametrize(
    "options", [{"strategies": []}, {"strategies": ["packed", "packed"]}, {"seeds": [-1]}]
)
def test_compare_options_are_checked(options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        deployments.resolve("compare-strategies", None, options)


def test_every_deployment_of_the_project_resolves() -> None:
    document = yaml.safe_load(deployments.PACKAGED_YAML.read_text())
    num_resolved = 0
    for flow_name, info in deployments.FLOWS.items():
        named = deployments.deployments(flow_name)
        assert "quickstart" in named, flow_name
        for name in named:
            config, options = deployments.resolve(flow_name, name, {})
            assert config.drafter.mask_token_id is not None
            assert isinstance(options, info.options)
            num_resolved += 1
    # Every entry point belongs to a flow.
    assert num_resolved == len(document["deployments"])
    pools = {entry["work_pool"]["name"] for entry in document["deployments"]}
    assert pools == {"dflash-train", "dflash-data"}


OWN = "deployments: [{name: mine, entrypoint: flows.prune.prune}]"


@pytest.mark.parametrize(
    "text, is_used",
    [
        (OWN, True),
        ("deployments: [{name: theirs, entrypoint: other.py:flow}]", False),
        ("deployments: [{name: null, entrypoint: null}]", False),
        ("deployments: null", False),
        ("", False),
        ("name: something", False),
    ],
)
def test_a_file_of_the_working_directory_is_used_if_it_deploys_our_flows(
    text: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert deployments.prefect_yaml() == (tmp_path / "prefect.yaml" if is_used else deployments.PACKAGED_YAML)
    assert list(deployments.deployments("prune")) == (["mine"] if is_used else ["quickstart"])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"deployments: [", "not valid YAML: "),
        (b"\xff\xfe\xff", "cannot be read: "),
        (b"deployments: none", "deployments: not allowed; allowed: a list of mappings"),
        (b"deployments: [none]", "deployments: not allowed; allowed: a list of mappings"),
        (
            b"deployments: [{entrypoint: flows.prune.prune}]",
            "deployment 1: name: None is not allowed; allowed: a string",
        ),
        (
            b"deployments: [{name: quickstart, entrypoint: flows.prune.prune, parameters: [1]}]",
            "quickstart: parameters: [1] is not allowed; allowed: a mapping",
        ),
    ],
)
def test_a_broken_file_of_the_working_directory_is_named(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        deployments.resolve("prune", "quickstart", {})
    assert str(error.value).startswith(f"{tmp_path}/prefect.yaml: {message}")
