"""Files behind the names in a setting: every data file of a directory, nothing hidden, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.config import DataConfig, RunConfig
from dflash_core.errors import UserError
from tasks.storage.input_files import check_files, data_name, fetch_files, find_files
from tests.support.hub_stub import StubDataset, stub_hub


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
        (["hf://datasets/owner/chats-v2?split=train"], "chats-v2"),
        (["hf://datasets/owner/chats@main/x/*.jsonl"], "chats"),
    ],
)
def test_data_name(files: list[str], name: str) -> None:
    assert data_name(files) == name


def test_data_sets_of_the_hub_stand_next_to_files(
    chats: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("runs")
    name = "hf://datasets/owner/chats/x.jsonl"

    def check(*files: str) -> None:
        check_files(RunConfig(data=DataConfig(files=files), storage_root=str(root)))

    with stub_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.datasets["owner/chats"] = StubDataset({"main": {"x.jsonl": b"x"}}, card={"license": "mit"})
        check(name, str(chats / "a.jsonl"))
        assert hub.downloads() == []
        assert list(root.iterdir()) == []
        with pytest.raises(UserError, match="data.files: 'hf://datasets/owner/chats.split=train'"):
            check("hf://datasets/owner/chats?split=train")
        with pytest.raises(UserError, match="data.files: 'hf:///datasets/a/b' is not allowed"):
            check("hf:///datasets/a/b")
        said: list[str] = []
        files = fetch_files([name, str(chats / "a.jsonl"), name], root, said.append)
    assert sorted(path.name for path in files) == ["a.jsonl", "chats-x.jsonl"]
    assert ["licence: mit" in line for line in said] == [True]
