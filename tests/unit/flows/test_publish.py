"""Publishing a drafter: the files that are pushed, private by default, and no token in any message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import publish

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    directory = tmp_path / "drafter"
    directory.mkdir()
    for name in (*publish.FILES, "notes.txt"):
        (directory / name).write_text("{}")
    return directory


class Hub:
    """Records the calls of `huggingface_hub.HfApi`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = error

    def create_repo(self, repo: str, **given: Any) -> None:
        if self.error:
            raise self.error
        self.calls.append((repo, given))

    def upload_folder(self, **given: Any) -> Any:
        self.calls.append(("upload", given))
        return SimpleNamespace(commit_url="https://hub/commit/1")


def test_only_the_files_of_the_drafter_are_pushed_and_the_repository_is_private(drafter: Path) -> None:
    hub = Hub()
    assert publish.push(hub, drafter, "me/mine", private=True) == "https://hub/commit/1"
    assert hub.calls[0][1]["private"] is True
    assert hub.calls[1][1]["allow_patterns"] == ["config.json", "model.safetensors", "README.md"]


def test_a_refusal_is_one_message_without_the_token(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HUB", TOKEN)
    assert publish.token_of("env:MY_HUB") == TOKEN
    with pytest.raises(publish.UserError, match="'me/mine' cannot be written") as error:
        publish.push(Hub(OSError(f"401 for {TOKEN}")), drafter, "me/mine", private=True)
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize("reference", [TOKEN, "env:", "env:NOT_SET_ANYWHERE"])
def test_a_token_is_given_by_reference(reference: str) -> None:
    with pytest.raises(publish.UserError, match="--token") as error:
        publish.token_of(reference)
    assert TOKEN not in str(error.value)


def test_a_dry_run_prints_what_would_be_pushed(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quickstart", "--repo", "me/mine", "--drafter", str(drafter), "--dry-run"]
    assert publish.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "model.safetensors  2 bytes" in printed
    assert "notes.txt" not in printed
    assert "me/mine (private" in printed


def test_a_name_without_an_owner_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert publish.main(["quickstart", "--repo", "mine"]) == 2
    assert "--repo: 'mine' is not allowed; allowed: OWNER/NAME" in capsys.readouterr().err
