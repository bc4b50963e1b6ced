"""The engine runs as a child process that answers by a file, in its own environment."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.serving import engine


def fake_engine(directory: Path, body: str) -> Path:
    """Write an executable in place of a Python, called as `python -P script request answer`."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_engine_is_a_child_that_answers_by_a_file(tmp_path: Path) -> None:
    python = fake_engine(tmp_path, 'echo "$1 $(basename $2)"; cp "$3" "$4"')
    assert engine.run_engine(python, {"prompts": [[1]]}, tmp_path, "plain") == {"prompts": [[1]]}
    assert (tmp_path / "plain.log").read_text() == "-P vllm_engine.py\n"
    # The same request is not sent again.
    fake_engine(tmp_path, "exit 1")
    assert engine.run_engine(python, {"prompts": [[1]]}, tmp_path, "plain") == {"prompts": [[1]]}
    with pytest.raises(UserError, match="code 1"):
        engine.run_engine(python, {"prompts": [[2]]}, tmp_path, "plain")
    assert not (tmp_path / "plain-answer.json").exists()


@pytest.mark.parametrize(
    "body, message", [("echo no memory; exit 3", "code 3.*no memory"), ("true", "code 0")]
)
def test_an_engine_that_fails_is_a_message(tmp_path: Path, body: str, message: str) -> None:
    python = fake_engine(tmp_path, body)
    # Of an earlier run, with another request.
    (tmp_path / "plain-answer.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        engine.run_engine(python, {}, tmp_path, "plain")


def test_the_engines_version_is_that_of_its_environment(tmp_path: Path) -> None:
    assert engine.engine_version(fake_engine(tmp_path, "echo 0.32.0")) == "0.32.0"
    with pytest.raises(UserError, match="has no vLLM"):
        engine.engine_version(fake_engine(tmp_path, "exit 1"))
    with pytest.raises(UserError, match="make serve-env"):
        engine.engine_version(tmp_path / "none")


def test_the_control_names_other_layers(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    config = {"num_target_layers": 30, "dflash_config": {"target_layer_ids": [1, 27], "block_size": 8}}
    path = tmp_path / "drafter" / "config.json"
    for ids, shifted in (([1, 27], [2, 28]), ([1, 29], [0, 28])):
        config["dflash_config"]["target_layer_ids"] = ids
        path.write_text(json.dumps(config))
        out = engine.shifted_copy(tmp_path / "drafter", tmp_path / "shifted")
        changed = json.loads((out / "config.json").read_text())
        assert changed["dflash_config"] == {"target_layer_ids": shifted, "block_size": 8}
    assert json.loads(path.read_text()) == config  # the drafter itself is unchanged


def test_the_engines_script_imports_nothing_of_this_project() -> None:
    tree = ast.parse(engine.SCRIPT.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"vllm"}
