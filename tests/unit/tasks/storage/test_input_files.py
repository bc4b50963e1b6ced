"""Files behind the names in a setting: every data file of a directory, nothing hidden, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.errors import UserError
from tasks.storage.input_files import data_name, find_files


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    for name in (
        "a.jsonl",
        "B.JSONL",
        "deep/c.parquet",
        "d.json.gz",
        "README.md",
        ".cache/e.json",
        "deep/.f.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    return tmp_path


def names(chats: Path, *patterns: str) -> list[str]:
    return [str(path.relative_to(chats)) for path in find_files([str(chats / p) for p in patterns])]


def test_a_directory_is_searched_for_data_files(chats: Path) -> None:
    assert names(chats, "") == ["B.JSONL", "a.jsonl", "d.json.gz", "deep/c.parquet"]


def test_names_and_globs_take_exactly_what_they_match(chats: Path) -> None:
    assert names(chats, "README.md", "**/*.jsonl", "a.jsonl") == ["README.md", "a.jsonl"]
    assert names(chats, "deep/.f.jsonl") == ["deep/.f.jsonl"]


@pytest.mark.parametrize("pattern", ["none.jsonl", "*.csv", ".cache"])
def test_a_name_without_files_is_rejected(chats: Path, pattern: str) -> None:
    if pattern == ".cache":
        (chats / ".cache" / "e.json").unlink()
    with pytest.raises(UserError, match="data.files: .* has no file; allowed"):
        find_files([str(chats / pattern)])


@pytest.mark.parametrize(
    "files, name",
    [
        ([], "stdlib"),
        (["chats/a.jsonl.zst"], "a"),
        (["data/chats/*.jsonl"], "chats"),
        (["data/chats/**/*.jsonl", "b.jsonl", "c"], "chats-and-2-more"),
        (["*.jsonl"], "data"),
    ],
)
def test_data_name(files: list[str], name: str) -> None:
    assert data_name(files) == name
