"""Figures of the data set in a report."""

from __future__ import annotations

from tasks import report


def lost(rows: int, tokens: int) -> dict[str, int]:
    return {"num_over_length": rows, "num_over_length_tokens": tokens}


def test_rejects_and_notes_of_all_files_are_counted() -> None:
    files = [
        {
            "num_rejected": 3,
            **lost(2, 900),
            "rejects": {"invalid JSON": 1, "over length": 2},
            "notes": {"last turn cut": 4},
        },
        {"num_rejected": 2, **lost(0, 50), "rejects": {"invalid JSON": 2}, "notes": {}},
    ]
    figures = report.dataset_figures({"num_samples": 9}, files, num_repeats=1)
    assert figures == {
        "num_samples": 9,
        "num_files": 2,
        "num_rejected": 5,
        "num_over_length": 2,
        "num_over_length_tokens": 950,
        "num_repeats": 1,
        "rejects": {"invalid JSON": 3, "over length": 2},
        "notes": {"last turn cut": 4},
    }
