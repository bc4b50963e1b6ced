"""The result of a serve check: each failure is reported, in JSON, tables and the run's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_core.serving.agreement import (
    StepCounts,
    compare_counts,
)
from dflash_core.serving.check import check_result
from tasks import report
from tasks.reporting import report_tables, serve_check_tables
from tests.support.engine_answers import engine_answer

ENGINE = StepCounts(steps=4000, accepted=(800, 160, 40))  # acceptance length 1.25


def results(**changes: Any) -> dict[str, Any]:
    """Return the result of a check with these comparisons and differences."""
    differences = changes.pop("differences", [])
    comparisons = {
        "speculative": compare_counts(ENGINE, ENGINE),
        "control": compare_counts(StepCounts(steps=4000, accepted=(200, 10, 0)), ENGINE),
    } | changes
    for comparison in comparisons.values():
        counts = {"equal": 9, "engine_more": 1, "evaluator_more": 0, "accepting": 5}
        comparison["steps_from_the_same_token"] = counts
        comparison.setdefault("steps_agree", True)
    answers = {
        name: engine_answer([[1, 2]], 1, [1, 0, 0], token_ids=[[5] * 100, [6] * 100])
        for name in ("plain", "speculative", "control")
    }
    request = {"prompts": [[1], [2]], "max_new_tokens": 100, "max_num_seqs": 4, "dtype": "bfloat16"}
    return check_result(answers, comparisons, differences, request, evaluator_dtype="float32")


def test_each_failure_is_reported() -> None:
    far = {"prompt": 0, "position": 4, "margin_steps": 9.0, "near_tie": False}
    near = {"prompt": 1, "position": 4, "margin_steps": 1.0, "near_tie": True}
    few = StepCounts(steps=100, accepted=(20, 4, 1))
    cases = {
        "": results(differences=[near]),
        "1 greedy outputs differ": results(differences=[near, far]),
        "100 verification steps; 3000 are needed": results(speculative=compare_counts(few, few)),
        "position 1: the engine accepts 0.0500, the evaluator 0.2000": results(
            speculative=compare_counts(StepCounts(steps=4000, accepted=(200, 10, 0)), ENGINE)
        ),
        "this check proves nothing": results(control=compare_counts(ENGINE, ENGINE)),
        "from the same token: 9 accept the same": results(
            speculative=compare_counts(ENGINE, ENGINE) | {"steps_agree": False}
        ),
    }
    assert results(control=compare_counts(ENGINE, ENGINE) | {"steps_agree": False})["passed"]
    for message, result in cases.items():
        assert result["passed"] is (message == "")
        assert message in "; ".join(result["failures"])
        assert (message or "differs at a near tie for 1") in serve_check_tables.to_markdown(result)
        json.dumps(result)
    assert cases[""]["speculative_tokens_per_second"] == 100.0
    assert serve_check_tables.mlflow_metrics(cases[""])["serve/position_1"] == 0.2


def test_the_result_goes_into_the_report_of_the_run(tmp_path: Path) -> None:
    result = results()
    report.add_serve_check(tmp_path, result)  # a drafter whose run wrote no report
    assert list(tmp_path.iterdir()) == []
    rows = report_tables.serving_rows(result)
    assert rows == [("acceptance length in vLLM, evaluator on the same text", "1.250, 1.250: agree")]
    assert report_tables.serving_rows(None) == []
