"""Rows of the reports, on figures that a person can check."""

from __future__ import annotations

from tasks.reporting import report_tables


def test_samples_and_tokens_of_each_bucket() -> None:
    assert report_tables.bucket_rows([3, 4, 8], [2, 1, 2], [0, 4, 8, 9]) == [
        {"longer than": 0, "up to": 4, "samples": 3, "tokens": 10, "filled": 0.8333},
        {"longer than": 4, "up to": 8, "samples": 2, "tokens": 16, "filled": 1.0},
        {"longer than": 8, "up to": 9, "samples": 0, "tokens": 0, "filled": None},
    ]


def test_profile_has_one_row_per_source_and_one_for_all() -> None:
    figures = dict.fromkeys(report_tables.PROFILE_FIGURES, 1.23456)
    rows = report_tables.source_rows({"sources": [{"source": "chats", **figures}], "stats": figures})
    assert [row["source"] for row in rows] == ["chats", "all"]
    assert rows[1]["mean length"] == 1.2346


def test_acceptance_by_set_by_category_and_pooled() -> None:
    evaluation = {
        "acceptance_length": 1.5,
        "acceptance_interval": [1.25, 2.0],
        "prompts": 3,
        "sets": {
            "gsm8k": {"acceptance_length": 2.0, "acceptance_interval": [2.0, 2.0], "prompts": 1},
            "mt": {"acceptance_length": 1.25, "acceptance_interval": [1.0, 1.5], "prompts": 2},
        },
        "categories": {
            "mt/writing": {"acceptance_length": 1.25, "acceptance_interval": [1.0, 1.5], "prompts": 2}
        },
    }
    assert report_tables.acceptance_rows(evaluation) == [
        ("acceptance length, gsm8k", "2.000 (2.000 to 2.000) on 1 prompts"),
        ("acceptance length, mt", "1.250 (1.000 to 1.500) on 2 prompts"),
        ("acceptance length, mt/writing", "1.250 (1.000 to 1.500) on 2 prompts"),
        ("acceptance length, all", "1.500 (1.250 to 2.000) on 3 prompts"),
    ]


def test_over_length_rows_and_their_share_of_tokens() -> None:
    data = {"num_tokens": 9_000, "num_over_length": 2, "num_over_length_tokens": 1_000}
    assert report_tables.over_length_text(data) == "2, at least 10.0%"
    assert report_tables.over_length_text({"num_tokens": 9_000}) == "0, 0.0%"


def test_many_sources_are_cut_with_a_count() -> None:
    """The largest ones are shown; all of them are in profile.json."""
    number = report_tables.SHOWN_SOURCES + 3
    sources = [{"source": f"s{i}", "num_tokens": i} for i in range(number)]
    rows = report_tables.source_rows({"sources": sources, "stats": {"num_tokens": 9}})
    assert len(rows) == report_tables.SHOWN_SOURCES + 2
    assert rows[0]["source"] == f"s{number - 1}"
    assert [row["source"] for row in rows[-2:]] == ["3 more, in profile.json", "all"]


def test_steps_that_a_time_limit_left_out() -> None:
    limited = {"steps": 445, "planned_steps": 1900, "max_minutes": 3.0}
    assert report_tables.steps_text(limited) == "445 of 1,900 (training.max_minutes 3)"
    assert report_tables.steps_text(limited | {"steps": 1900}) == "1,900"
    # A report of a run before there was such a limit.
    assert report_tables.steps_text({"steps": 445}) == "445"
