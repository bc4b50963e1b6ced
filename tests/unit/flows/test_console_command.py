"""The console command: it lists what there is, and names what was typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows.runtime import command, deployments


@pytest.fixture(autouse=True)
def safe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets this variable; setting it first restores it afterwards."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")


def test_help_lists_every_flow_with_its_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for flow_name, info in deployments.FLOWS.items():
        assert f"\n  {flow_name} " in shown
        assert info.summary in shown
    assert "deployments: quickstart, smollm2, smollm2-regenerated, qwen3-8b\n" in shown
    assert "train-dflash serve" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_without_arguments_it_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert capsys.readouterr().err.startswith("usage: train-dflash FLOW NAME")


def test_a_deployment_without_its_flow_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["quickstart"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: FLOW: 'quickstart' is not allowed; allowed: train-dflash, rebucket,")
    assert shown.endswith("example: train-dflash train-dflash quickstart\n")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [["rebucket", "--help"], ["serve", "--help"]])
def test_help_names_the_command_that_was_typed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = command.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: train-dflash {arguments[0]} [")
    assert "python -m flows.rebucket" not in shown


def test_a_wrong_option_names_the_command_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["prune", "quickstart", "--remove"])
    assert "train-dflash prune: error: unrecognized arguments: --remove" in capsys.readouterr().err


def test_processes_that_it_starts_do_not_import_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH")
    command.main(["--help"])
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_a_file_here_with_our_flows_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = "{name: mine, entrypoint: flows.prune.prune, parameters: {}}"
    (tmp_path / "prefect.yaml").write_text(f"deployments: [{entry}]\n")
    monkeypatch.chdir(tmp_path)
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert f"deployments in {tmp_path}/prefect.yaml" in shown
    assert "deployments: mine" in shown
    assert "deployments: none" in shown
    assert "quickstart\n" not in shown.split("examples:")[0]


def test_serve_refuses_a_directory_with_packages_named_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert command.main(["serve"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: working directory: '{tmp_path}/tasks/__init__.py' would be imported")
    assert not (tmp_path / "runs").exists()
