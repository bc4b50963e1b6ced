"""What goes to Prefect's UI."""

from __future__ import annotations

import base64
from pathlib import Path

from tasks.reporting import prefect_artifacts as artifacts


def test_plots_travel_within_the_report(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "a.png").write_bytes(b"picture")
    text = artifacts.with_images("x ![a b](plots/a.png) ![gone](plots/gone.png)", tmp_path)
    data = base64.b64encode(b"picture").decode()
    assert text == f"x ![a b](data:image/png;base64,{data}) ![gone](plots/gone.png)"


def test_what_lies_in_each_bucket() -> None:
    assert artifacts.bucket_rows([3, 4, 8], [2, 1, 2], [0, 4, 8, 9]) == [
        {"longer than": 0, "up to": 4, "samples": 3, "tokens": 10, "filled": 0.8333},
        {"longer than": 4, "up to": 8, "samples": 2, "tokens": 16, "filled": 1.0},
        {"longer than": 8, "up to": 9, "samples": 0, "tokens": 0, "filled": None},
    ]


def test_profile_has_a_row_a_source_and_one_for_all() -> None:
    figures = dict.fromkeys(artifacts.PROFILE_FIGURES, 1.23456)
    rows = artifacts.source_rows({"sources": [{"source": "chats", **figures}], "stats": figures})
    assert [row["source"] for row in rows] == ["chats", "all"]
    assert rows[1]["mean length"] == 1.2346


def test_keys_are_what_prefect_takes() -> None:
    assert artifacts.slug("Qwen3_8B é") == "qwen3-8b" and artifacts.slug("__") == "run"
