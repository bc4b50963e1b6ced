"""An evaluation in words and tables: one prompt at a time first, and with its protocol."""

from __future__ import annotations

from typing import Any

from tasks.reporting import evaluation_tables


def speed(plain: float, speculative: float, **more: Any) -> dict[str, Any]:
    return {
        "plain_tokens_per_second": plain,
        "speculative_tokens_per_second": speculative,
        "speedup": speculative / plain,
        "speedup_interval": [1.5, 1.75],
        **more,
    }


SINGLE = speed(45.0, 72.0, prompts=2, prompts_equal=2, batch_size=1)
BATCHED = speed(200.0, 180.0, prompts=3, prompts_equal=3, batch_size=8, speedup_interval=None)
EVALUATION: dict[str, Any] = {
    "acceptance_length": 1.5,
    "acceptance_interval": [1.25, 2.0],
    "acceptance_by_position": [0.62, 0.31, 0.14],
    "prompts": 3,
    "steps": 1234,
    "lossless": True,
    "one_at_a_time": SINGLE,
    "batched": BATCHED,
    "protocol": {
        "temperature": 0.0,
        "max_new_tokens": 2048,
        "template_arguments": {"enable_thinking": False},
        "threads": 2,
    },
    "sets": {
        "gsm8k": {
            "acceptance_length": 2.0,
            "acceptance_interval": [2.0, 2.0],
            "acceptance_by_position": [1.0],
            "prompts": 1,
            "steps": 10,
            "one_at_a_time": speed(40.0, 80.0),
            "batched": speed(100.0, 100.0),
        },
    },
    "categories": {
        "mt/writing": {
            "acceptance_length": 1.25,
            "acceptance_interval": [1.0, 1.5],
            "prompts": 2,
            "steps": 9,
            "acceptance_by_position": [0.25],
        }
    },
}


def test_the_headline_gives_both_speeds_their_ratio_and_the_positions() -> None:
    assert evaluation_tables.headline(EVALUATION) == (
        "one prompt at a time: plain 45 tokens/s, speculative 72 tokens/s: 1.60 times (95%: 1.50 to 1.75); "
        "drafts accepted by position: 0.62, 0.31, 0.14"
    )


def test_rows_have_both_speeds_and_the_protocol() -> None:
    rows = dict(evaluation_tables.evaluation_rows(EVALUATION))
    assert rows["one prompt at a time"].startswith("plain 45 tokens/s, speculative 72 tokens/s: 1.60 times")
    assert rows["one prompt at a time"].endswith("on 2 prompts, output equal for 2")
    assert rows["in batches of 8"] == (
        "plain 200 tokens/s, speculative 180 tokens/s: 0.90 times on 3 prompts, output equal for 3"
    )
    assert rows["protocol"] == (
        'temperature 0.00, max new tokens 2,048, template arguments {"enable_thinking": false}, threads 2, '
        "3 prompts, 1,234 steps"
    )


def test_the_table_has_sets_categories_and_all_prompts() -> None:
    header, rows = evaluation_tables.set_table(EVALUATION)
    assert header[-2:] == ["one at a time", "batches of 8"]
    assert rows == [
        [
            *("gsm8k", "1", "10", "2.000 (2.000 to 2.000)", "1.00"),
            *("2.00 times (95%: 1.50 to 1.75)", "1.00 times (95%: 1.50 to 1.75)"),
        ],
        ["mt/writing", "2", "9", "1.250 (1.000 to 1.500)", "0.25", "-", "-"],
        [
            *("all", "3", "1,234", "1.500 (1.250 to 2.000)", "0.62, 0.31, 0.14"),
            *("1.60 times (95%: 1.50 to 1.75)", "0.90 times"),
        ],
    ]
    text = evaluation_tables.to_markdown(EVALUATION)
    assert "**One prompt at a time: plain 45 tokens/s" in text
    assert "Protocol: temperature 0.00" in text


def test_without_batches_there_is_one_speed() -> None:
    alone = EVALUATION | {"batched": None, "turns_without_room": 2}
    assert len(evaluation_tables.evaluation_rows(alone)) == 6
    assert evaluation_tables.set_table(alone)[0][-1] == "one at a time"
    assert "2 later turns left out" in evaluation_tables.protocol_text(alone)


def test_mlflow_gets_both_speeds_and_the_positions() -> None:
    assert evaluation_tables.mlflow_metrics(EVALUATION) == {
        "accept/position_1": 0.62,
        "accept/position_2": 0.31,
        "accept/position_3": 0.14,
        "single/plain_tokens_per_second": 45.0,
        "single/speculative_tokens_per_second": 72.0,
        "single/speedup": 1.6,
        "batched/plain_tokens_per_second": 200.0,
        "batched/speculative_tokens_per_second": 180.0,
        "batched/speedup": 0.9,
    }


def test_an_evaluation_of_an_older_version_is_still_shown() -> None:
    old = {"acceptance_length": 1.5, "prompts": 3}
    assert evaluation_tables.headline(old).startswith("one prompt at a time: -;")
    assert "| all | 3 |" in evaluation_tables.to_markdown(old)
    assert evaluation_tables.mlflow_metrics(old) == {}


def test_differences_by_rounding_are_counted_and_explained() -> None:
    figures = {"lossless": True, "prompts": 32, "prompts_equal": 32, "near_ties": 0}
    assert evaluation_tables.lossless_text(figures) == "yes"
    assert evaluation_tables.lossless_text(figures | {"prompts_equal": 29, "near_ties": 3}) == (
        "yes; 3 of 32 answers differ, 3 from a near tie on: a block rounds differently from single tokens, "
        "whatever was drafted"
    )
    wrong = figures | {"lossless": False, "prompts_equal": 30}
    assert evaluation_tables.lossless_text(wrong) == "no; 2 of 32 answers differ, 0 from a near tie on"
    assert evaluation_tables.lossless_text({"lossless": None, "prompts": 2, "prompts_equal": None}) == "-"
