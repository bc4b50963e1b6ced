"""The comparison with a serving engine: what passes, what has to fail, and how the engine is run."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from dflash_core.serving.agreement import (
    StepCounts,
    compare_counts,
    compare_steps,
    steps_agree,
    wilson_interval,
)
from tasks import report, serve_check
from tasks.reporting import report_tables


def test_counts_by_hand() -> None:
    counts = StepCounts.of_steps([2, 0, 1, 3], block_size=4)
    assert counts == StepCounts(steps=4, accepted=(3, 2, 1))
    assert counts.acceptance_length == 1 + 6 / 4
    assert StepCounts.of_steps([], block_size=3).acceptance_length == 1.0


@pytest.mark.parametrize(
    "successes, trials, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    """Against published values of the Wilson score interval."""
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


ENGINE = StepCounts(steps=4000, accepted=(800, 160, 40))  # acceptance length 1.25


@pytest.mark.parametrize(
    "evaluator, agrees, why",
    [
        (StepCounts(steps=4000, accepted=(800, 160, 40)), True, "equal"),
        (StepCounts(steps=3990, accepted=(806, 150, 41)), True, "noise"),
        (StepCounts(steps=4000, accepted=(720, 200, 80)), False, "the same length by other positions"),
        (StepCounts(steps=4000, accepted=(835, 175, 48)), False, "5.8% more than the engine, inside all intervals"),
        (StepCounts(steps=4000, accepted=(400, 80, 20)), False, "half as good"),
    ],
)  # fmt: skip
def test_agreement_asks_for_every_position_and_for_the_length(
    evaluator: StepCounts, agrees: bool, why: str
) -> None:
    found = compare_counts(ENGINE, evaluator)
    assert found["agrees"] is agrees, why
    if why.startswith("the same"):
        assert found["length_agrees"] and [p["agrees"] for p in found["positions"]] == [False, False, False]
    if why.startswith("5.8%"):
        assert all(p["agrees"] for p in found["positions"]) and not found["length_agrees"]


def test_few_steps_prove_nothing() -> None:
    few = StepCounts(steps=2999, accepted=(600, 120, 30))
    found = compare_counts(few, few)
    assert (found["agrees"], found["length_agrees"], found["enough_steps"]) == (False, True, False)


def test_a_drafter_that_drafts_nothing_agrees_with_itself_alone() -> None:
    nothing = StepCounts(steps=4000, accepted=(0, 0, 0))
    assert compare_counts(nothing, nothing)["agrees"] is True
    assert compare_counts(nothing, ENGINE)["agrees"] is False


def test_steps_are_compared_where_they_start_together() -> None:
    """Prompt 1: engine steps at 0, 2, 3; ours at 0, 1, 3: together at 0 (2 against 1) and 3 (last for neither)."""
    engine, ours = [[2, 1, 2, 1], [1, 1]], [[1, 2, 2, 4], [3, 1]]
    assert compare_steps(engine, ours) == {
        "equal": 1, "engine_more": 1, "evaluator_more": 1, "accepting": 3,
    }  # fmt: skip


@pytest.mark.parametrize("differing, agrees", [(0, True), (5, True), (6, False)])
def test_steps_may_differ_at_a_twentieth_of_those_that_accept(differing: int, agrees: bool) -> None:
    counts = {"equal": 1000, "engine_more": differing, "evaluator_more": 0, "accepting": 100}
    assert steps_agree(counts) is agrees


def test_what_real_checks_found_is_told_apart() -> None:
    """A drafter that earns 2.2 in an engine that normed one layer's keys wrongly, and with layers one off."""
    for equal, more, less, accepting in ((3844, 70, 119, 2421), (941, 41, 90, 650)):
        counts = {"equal": equal, "engine_more": more, "evaluator_more": less, "accepting": accepting}
        assert not steps_agree(counts)


def answer(emitted: list[list[int]], steps: int, accepted: list[int], **more: Any) -> dict[str, Any]:
    metrics = {
        "steps": steps,
        "drafted": 3 * steps,
        "accepted": sum(accepted),
        "accepted_by_position": accepted,
    }
    return {"emitted": emitted, "metrics": metrics, "version": "0", "seconds": 2.0} | more


def test_the_trace_of_the_engine_has_to_fit_its_metrics() -> None:
    """Two prompts: the prefill's token, then steps; the last step of the second was cut by two tokens."""
    good = answer([[1, 2, 1], [1, 3, 1]], steps=4, accepted=[3, 2, 0])
    serve_check.check_trace(good)
    assert serve_check.engine_counts(good) == StepCounts(steps=4, accepted=(3, 2, 0))
    for wrong in (
        answer([[1, 2, 1], [1, 3, 1]], steps=3, accepted=[3, 2, 0]),  # outputs that hold two steps
        answer([[1, 2, 1], [1, 3, 1]], steps=4, accepted=[2, 0, 0]),  # accepted, yet not counted
        answer([[1, 2, 1], [1, 3, 1]], steps=4, accepted=[4, 4, 4]),  # more than the last steps can hide
    ):
        with pytest.raises(AssertionError):
            serve_check.check_trace(wrong)


def results(**changes: Any) -> dict[str, Any]:
    """`_result` of hand-made parts."""
    differences = changes.pop("differences", [])
    parts = {"speculative": compare_counts(ENGINE, ENGINE), "control": compare_counts(ENGINE, ENGINE)}
    parts["control"] = compare_counts(StepCounts(steps=4000, accepted=(200, 10, 0)), ENGINE)
    for found in (parts | changes).values():
        found["steps_from_the_same_token"] = {
            "equal": 9,
            "engine_more": 1,
            "evaluator_more": 0,
            "accepting": 5,
        }
        found.setdefault("steps_agree", True)
    answers = {
        name: answer([[1, 2]], 1, [1, 0, 0], token_ids=[[5] * 100, [6] * 100])
        for name in ("plain", "speculative", "control")
    }
    request = {"prompts": [[1], [2]], "max_new_tokens": 100, "max_num_seqs": 4, "dtype": "bfloat16"}
    return serve_check._result(answers, parts | changes, differences, request, RunConfig())


def test_what_fails_is_said() -> None:
    far = {"prompt": 0, "position": 4, "margin_steps": 9.0, "near_tie": False}
    near = {"prompt": 1, "position": 4, "margin_steps": 1.0, "near_tie": True}
    few = StepCounts(steps=100, accepted=(20, 4, 1))
    cases = {
        "": results(differences=[near]),
        "1 greedy outputs part": results(differences=[near, far]),
        "100 verification steps; 3000 are needed": results(speculative=compare_counts(few, few)),
        "position 1: the engine accepts 0.0500, the evaluator 0.2000": results(
            speculative=compare_counts(StepCounts(steps=4000, accepted=(200, 10, 0)), ENGINE)
        ),
        "this check sees nothing": results(control=compare_counts(ENGINE, ENGINE)),
        "from the same token: 9 accept the same": results(
            speculative=compare_counts(ENGINE, ENGINE) | {"steps_agree": False}
        ),
    }
    assert results(control=compare_counts(ENGINE, ENGINE) | {"steps_agree": False})["passed"]
    for message, result in cases.items():
        assert result["passed"] is (message == "")
        assert message in "; ".join(result["failures"])
        assert (message or "parts at a near tie for 1") in serve_check.to_markdown(result)
        json.dumps(result)
    assert cases[""]["speculative_tokens_per_second"] == 100.0
    assert serve_check.mlflow_metrics(cases[""])["serve/position_1"] == 0.2


def test_the_run_gets_it_into_its_report(tmp_path: Path) -> None:
    result = results()
    report.add_serve_check(tmp_path, result)  # a drafter whose run wrote no report
    assert list(tmp_path.iterdir()) == []
    rows = report_tables.serving_rows(result)
    assert rows == [("acceptance length in vLLM, evaluator on the same text", "1.250, 1.250: agree")]
    assert report_tables.serving_rows(None) == []


def fake_engine(directory: Path, body: str) -> Path:
    """An executable in place of a python: called as `python -P script request answer`."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_engine_is_a_child_that_answers_by_a_file(tmp_path: Path) -> None:
    python = fake_engine(tmp_path, 'echo "$1 $(basename $2)"; cp "$3" "$4"')
    assert serve_check.run_engine(python, {"prompts": [[1]]}, tmp_path, "plain") == {"prompts": [[1]]}
    assert (tmp_path / "plain.log").read_text() == "-P vllm_engine.py\n"
    fake_engine(tmp_path, "exit 1")  # not asked the same again
    assert serve_check.run_engine(python, {"prompts": [[1]]}, tmp_path, "plain") == {"prompts": [[1]]}
    with pytest.raises(UserError, match="code 1"):
        serve_check.run_engine(python, {"prompts": [[2]]}, tmp_path, "plain")
    assert not (tmp_path / "plain-answer.json").exists()


@pytest.mark.parametrize(
    "body, message", [("echo no memory; exit 3", "code 3.*no memory"), ("true", "code 0")]
)
def test_an_engine_that_fails_is_a_message(tmp_path: Path, body: str, message: str) -> None:
    python = fake_engine(tmp_path, body)
    (tmp_path / "plain-answer.json").write_text("{}")  # of an earlier run: not to be taken for this one's
    with pytest.raises(UserError, match=message):
        serve_check.run_engine(python, {}, tmp_path, "plain")


def test_the_engines_version_is_asked_of_its_environment(tmp_path: Path) -> None:
    assert serve_check.engine_version(fake_engine(tmp_path, "echo 0.32.0")) == "0.32.0"
    with pytest.raises(UserError, match="has no vLLM"):
        serve_check.engine_version(fake_engine(tmp_path, "exit 1"))
    with pytest.raises(UserError, match="make serve-env"):
        serve_check.engine_version(tmp_path / "none")


def test_the_control_names_other_layers(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    config = {"num_target_layers": 30, "dflash_config": {"target_layer_ids": [1, 27], "block_size": 8}}
    path = tmp_path / "drafter" / "config.json"
    for ids, shifted in (([1, 27], [2, 28]), ([1, 29], [0, 28])):
        config["dflash_config"]["target_layer_ids"] = ids
        path.write_text(json.dumps(config))
        out = serve_check.shifted_copy(tmp_path / "drafter", tmp_path / "shifted")
        changed = json.loads((out / "config.json").read_text())
        assert changed["dflash_config"] == {"target_layer_ids": shifted, "block_size": 8}
    assert json.loads(path.read_text()) == config  # the drafter itself stays


def test_the_engines_script_imports_nothing_of_this_project() -> None:
    tree = ast.parse(serve_check.SCRIPT.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"vllm"}
