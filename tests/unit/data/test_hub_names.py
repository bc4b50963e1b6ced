"""Names of data sets on the Hub, and the files that they mean."""

from __future__ import annotations

import pytest

from dflash_core.data.hub_names import HubName, is_hub_name, local_names, parse, path_files, split_files
from dflash_core.errors import UserError

PARQUET = "refs/convert/parquet"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/chats", (PARQUET, None, None, None)),
        ("owner/chats?split=train", (PARQUET, None, "train", None)),
        ("owner/chats?config=en&split=train", (PARQUET, None, "train", "en")),
        ("owner/chats/a/b.jsonl", ("main", "a/b.jsonl", None, None)),
        ("owner/chats/a/", ("main", "a", None, None)),
        ("owner/chats@v1.0/a/*.jsonl", ("v1.0", "a/*.jsonl", None, None)),
        ("owner/chats@a%2Fb/x", ("a/b", "x", None, None)),
        ("owner/chats@refs/pr/7/x", ("refs/pr/7", "x", None, None)),
        ("owner/chats@~parquet/default/train", (PARQUET, "default/train", None, None)),
        ("owner/chats@refs/convert/parquet/default", (PARQUET, "default", None, None)),
    ],
)
def test_names(name: str, expected: tuple[str | None, ...]) -> None:
    text = f"hf://datasets/{name}"
    assert is_hub_name(text)
    revision, path, split, config = expected
    assert parse(text) == HubName(
        text=text,
        repository="owner/chats",
        revision=str(revision),
        path=path,
        split=split,
        config=config,
    )


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://datasets/chats",
        "hf://models/owner/chats",
        "hf://datasets/owner/chats@v1",
        "hf://datasets/owner/chats@v1?split=train",
        "hf://datasets/owner/chats/a.jsonl?split=train",
        "hf://datasets/owner/chats?split=",
        "hf://datasets/owner/chats?splits=train",
        "hf://datasets/owner/chats?split=train&split=test",
    ],
)
def test_other_forms_are_rejected(text: str) -> None:
    with pytest.raises(UserError, match="data.files: .* is not allowed; allowed: hf://datasets/OWNER/NAME"):
        parse(text)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "x/b.jsonl", "x/y/c-[1].jsonl"]),
        ("x/**", ["x/b.jsonl", "x/y/c-[1].jsonl"]),
        ("**", ["a.jsonl", "x/b.jsonl", "x/y/c-[1].jsonl"]),
        ("x/*/c*", ["x/y/c-[1].jsonl"]),
        ("[!b].jsonl", ["a.jsonl"]),
        ("x/[a-c].jsonl", ["x/b.jsonl"]),
        ("x/y/c-[1].jsonl", ["x/y/c-[1].jsonl"]),
        ("x", ["x/b.jsonl", "x/y/c-[1].jsonl"]),
    ],
)
def test_files_of_a_path(pattern: str, expected: list[str]) -> None:
    listed = [".git/d.jsonl", "README.md", "a.jsonl", "x/b.jsonl", "x/y/c-[1].jsonl"]
    name = parse(f"hf://datasets/owner/chats/{pattern}")
    assert path_files(name, str(name.path), listed) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?split=train", "default/train"),
        ("?config=fr&split=train", "fr/train"),
        ("?config=fr", "fr/train"),
        ("?split=partial-train", "en/partial-train"),
        ("?split=dev", "names no split .*config=default&split=train, "),
        ("?config=default", "names several splits"),
        ("?config=de&split=train", "names no split"),
    ],
)
def test_files_of_a_split(query: str, expected: str) -> None:
    splits = ("default/test", "default/train", "en/partial-train", "fr/train")
    listed = [f"{split}/{n:04}.parquet" for split in splits for n in range(2)]
    name = parse(f"hf://datasets/owner/chats{query}")
    if " " in expected:
        with pytest.raises(UserError, match=expected):
            split_files(name, listed)
    else:
        assert split_files(name, listed) == [f"{expected}/0000.parquet", f"{expected}/0001.parquet"]


def test_local_names_are_readable_and_distinct() -> None:
    assert local_names("owner/chats-1.5", ["default/train/0000.parquet", "v1.2/a.jsonl.gz", "b"]) == [
        "chats-1_5-default-train-0000.parquet",
        "chats-1_5-v1_2-a.jsonl.gz",
        "chats-1_5-b",
    ]
    assert len(set(local_names("owner/chats", ["a/b.jsonl", "a-b.jsonl"]))) == 2
    assert local_names("owner/chats", ["../a\x1b[31m\n.jsonl"]) == ["chats-__-a_[31m_.jsonl"]
    long = local_names("owner/chats", [f"{letter * 300}/{chr(0x1F600) * 300}.jsonl.gz" for letter in "ab"])
    assert len(set(long)) == 2
    assert all(len(name.encode()) < 240 and name.endswith(".jsonl.gz") for name in long)
