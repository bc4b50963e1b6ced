"""Pages and keys of artifacts in Prefect's UI."""

from __future__ import annotations

import base64
from pathlib import Path

from tasks.reporting import prefect_artifacts as artifacts


def test_plots_are_embedded_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "a.png").write_bytes(b"picture")
    text = artifacts.with_images("x ![a b](plots/a.png) ![gone](plots/gone.png)", tmp_path)
    data = base64.b64encode(b"picture").decode()
    assert text == f"x ![a b](data:image/png;base64,{data}) ![gone](plots/gone.png)"


def test_keys_are_valid_in_prefect() -> None:
    assert artifacts.slug("Qwen3_8B é") == "qwen3-8b"
    assert artifacts.slug("__") == "run"
