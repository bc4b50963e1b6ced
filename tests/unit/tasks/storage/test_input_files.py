"""Files behind the names in a setting: every data file of a directory, nothing hidden, each once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_core.config import DataConfig, RunConfig, from_dict
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


def test_a_data_set_of_this_package_is_a_file_like_any_other(chats: Path) -> None:
    found = find_files(["package://smollm2-boilerplate.jsonl", str(chats / "a.jsonl")])
    assert {path.name for path in found} == {"a.jsonl", "smollm2-boilerplate.jsonl"}


def test_a_glob_ends_where_links_form_loops(chats: Path) -> None:
    for name in ("deep/up", "deep/again", "here"):
        (chats / name).symlink_to(chats)
    assert names(chats, "**/*.parquet") == ["deep/c.parquet"]
    assert names(chats, "**") == names(chats, "**/**/*")


def test_brackets_of_a_directory_are_its_name(chats: Path) -> None:
    for name in ("run[1]", "run1"):
        (chats / name).mkdir()
        (chats / name / "x.jsonl").write_text("{}")
    assert names(chats, "run[1]/*.jsonl") == ["run[1]/x.jsonl"]
    assert names(chats, "run[0-9]/*.jsonl") == ["run1/x.jsonl"]


def test_the_home_of_an_unknown_user_is_a_name_without_files() -> None:
    with pytest.raises(UserError, match="data.files: '~nobody-of-this-name/x' has no file"):
        find_files(["~nobody-of-this-name/x"])


@pytest.mark.parametrize("pattern", ["none.jsonl", "*.csv", ".cache"])
def test_a_name_without_files_is_rejected(chats: Path, pattern: str) -> None:
    if pattern == ".cache":
        (chats / ".cache" / "e.json").unlink()
    with pytest.raises(UserError, match="data.files: .* has no file; allowed"):
        find_files([str(chats / pattern)])


def error_of_another_user(function: Callable[[], object]) -> str:
    """Return the message of the UserError that a call raises for a user without root's rights."""
    if os.getuid() != 0:
        with pytest.raises(UserError) as failure:
            function()
        return str(failure.value)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setuid(65534)
            function()
        except UserError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        return file.read()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "a").mkdir()
        (directory / "a" / "x.jsonl").write_text("{}")
        yield directory
        # So that its owner can remove it.
        (directory / "a").chmod(0o755)


@pytest.mark.parametrize("pattern", ["", "a", "a/x.jsonl", "a/*.jsonl", "**/*.jsonl", "*/x.jsonl", "a/none"])
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_that_cannot_be_entered_is_named(public: Path, pattern: str, mode: int) -> None:
    (public / "y.jsonl").write_text("{}")
    (public / "a").chmod(mode)
    message = error_of_another_user(lambda: find_files([str(public / pattern)]))
    assert f"data.files: '{public}/a' cannot be read: " in message
    assert "allowed: " in message


@pytest.mark.parametrize("pattern", ["", "a", "a/x.jsonl", "a/*.jsonl", "**/*.jsonl"])
def test_a_file_that_cannot_be_read_is_named(public: Path, pattern: str) -> None:
    (public / "a" / "x.jsonl").chmod(0o000)
    message = error_of_another_user(lambda: find_files([str(public / pattern)]))
    assert f"data.files: '{public}/a/x.jsonl' cannot be read: no permission" in message


@pytest.mark.parametrize("pattern", ["", "deep", "deep/z.jsonl", "**/*.jsonl"])
def test_a_link_that_points_nowhere_is_named(chats: Path, pattern: str) -> None:
    (chats / "deep" / "z.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError, match="deep/z.jsonl' is a link to 'gone.jsonl', which does not exist"):
        find_files([str(chats / pattern)])


def test_links_to_files_are_followed(chats: Path) -> None:
    (chats / "deep" / "z.jsonl").symlink_to("../a.jsonl")
    assert names(chats, "deep") == ["a.jsonl", "deep/c.parquet"]


@pytest.mark.parametrize("field", ["data.chat_template", "evaluation.prompts"])
def test_other_files_are_checked_too(public: Path, field: str) -> None:
    path = public / "a" / "x.jsonl"
    room, name = field.split(".")
    value = [str(path)] if name == "prompts" else str(path)
    config = from_dict(RunConfig, {room: {name: value}})
    check_files(config)
    path.chmod(0o000)
    assert f"{field}: '{path}' cannot be read" in error_of_another_user(lambda: check_files(config))
    path.parent.chmod(0o000)
    message = error_of_another_user(lambda: check_files(config))
    assert f"{field}: '{path.parent}' cannot be read" in message
    path.parent.chmod(0o755)
    path.unlink()
    with pytest.raises(UserError, match=f"{field}: .*x.jsonl' does not exist; allowed"):
        check_files(config)


def test_an_engine_that_is_not_there_is_named_before_the_training() -> None:
    config = from_dict(RunConfig, {"evaluation": {"engine": "vllm", "engine_python": "/nowhere/python"}})
    with pytest.raises(UserError, match="evaluation.engine_python: '/nowhere/python' does not exist"):
        check_files(config)


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
        files = fetch_files([name, str(chats / "a.jsonl"), name], root, said.append, limit_gb=1.0)
    assert sorted(path.name for path in files) == ["a.jsonl", "chats-x.jsonl"]
    assert ["licence: mit" in line for line in said] == [False, True]
