"""What a report says of data and acceptance."""

from __future__ import annotations

from tasks import report
from tasks.reporting import tables


def test_rejects_and_notes_of_all_files_are_counted() -> None:
    files = [
        {"num_rejected": 3, "rejects": {"invalid JSON": 1, "over length": 2}, "notes": {"last turn cut": 4}},
        {"num_rejected": 2, "rejects": {"invalid JSON": 2}, "notes": {}},
    ]
    figures = report.dataset_figures({"num_samples": 9}, files, num_repeats=1)
    assert figures == {
        "num_samples": 9,
        "num_files": 2,
        "num_rejected": 5,
        "num_repeats": 1,
        "rejects": {"invalid JSON": 3, "over length": 2},
        "notes": {"last turn cut": 4},
    }


def test_cells_keep_their_bars() -> None:
    table = tables.markdown_table(["reason", "rows"], [["unknown role '<|user|>'", "3"]])
    assert table.splitlines()[2] == "| unknown role '<\\|user\\|>' | 3 |"


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
    assert report.acceptance_rows(evaluation) == [
        ("acceptance length, gsm8k", "2.000 (2.000 to 2.000) on 1 prompts"),
        ("acceptance length, mt", "1.250 (1.000 to 1.500) on 2 prompts"),
        ("acceptance length, mt/writing", "1.250 (1.000 to 1.500) on 2 prompts"),
        ("acceptance length, all", "1.500 (1.250 to 2.000) on 3 prompts"),
    ]
