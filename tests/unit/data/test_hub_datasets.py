"""Data sets of the Hub: commits, downloads, runs without network, and each message; against a stub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_core.data import hub_datasets
from dflash_core.data.download_size import check_download
from dflash_core.errors import UserError
from tests.support import hub_stub
from tests.support.hub_stub import StubDataset, StubHub, stub_hub

CONVERTED = "refs/convert/parquet"


def chats() -> StubDataset:
    converted = {f"default/train/{n:04}.parquet": b"PAR1 train %d" % n for n in range(2)}
    converted["default/test/0000.parquet"] = b"PAR1 test"
    main = {"README.md": b"# Chats", "data/a.jsonl": b"a\n", "data/b.jsonl": b"b\n", "c.jsonl": b"c\n"}
    return StubDataset({"main": main, CONVERTED: converted}, card={"license": "apache-2.0"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with stub_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        stub.datasets["owner/chats"] = chats()
        yield stub


def fetch(name: str, root: Path) -> tuple[list[str], list[bytes], list[str]]:
    """Return names and contents of the files, and the lines that were said."""
    said: list[str] = []
    paths = hub_datasets.fetch(f"hf://datasets/{name}", root, said.append)
    return [path.name for path in paths], [path.read_bytes() for path in paths], said


def test_a_split_is_downloaded_once_and_its_licence_shown_once(hub: StubHub, tmp_path: Path) -> None:
    names, contents, said = fetch("owner/chats?split=train", tmp_path)
    assert names == ["chats-default-train-0000.parquet", "chats-default-train-0001.parquet"]
    assert contents == [b"PAR1 train 0", b"PAR1 train 1"]
    commit = hub.datasets["owner/chats"].commit(CONVERTED)
    line = f"hf://datasets/owner/chats?split=train: 2 files at commit {commit[:12]}; licence: apache-2.0"
    download = "hf://datasets/owner/chats?split=train: downloading 2 files, 0.000 GB"
    assert said == [download, line]
    assert len(hub.downloads()) == 2
    assert fetch("owner/chats?split=train", tmp_path) == (names, contents, [])
    assert len(hub.downloads()) == 2
    assert commit in str(hub_datasets.fetch("hf://datasets/owner/chats?split=train", tmp_path)[0])


def test_a_damaged_download_is_fetched_again(hub: StubHub, tmp_path: Path) -> None:
    """Its file may be a hard link to the one in the cache of huggingface_hub."""
    before = fetch("owner/chats/data", tmp_path)[:2]
    [path, _] = hub_datasets.fetch("hf://datasets/owner/chats/data", tmp_path, list)
    path.write_bytes(b"")
    assert fetch("owner/chats/data", tmp_path)[:2] == before
    assert len(hub.downloads()) == 3
    for record in path.parents[1].glob("*.json"):
        record.write_text("[1]")
    assert fetch("owner/chats/data", tmp_path)[:2] == before


def test_files_of_the_repository_by_path_directory_glob_and_revision(hub: StubHub, tmp_path: Path) -> None:
    assert fetch("owner/chats/data/a.jsonl", tmp_path)[1] == [b"a\n"]
    assert fetch("owner/chats/data", tmp_path)[1] == [b"a\n", b"b\n"]
    assert fetch("owner/chats/**/*.jsonl", tmp_path)[1] == [b"c\n", b"a\n", b"b\n"]
    assert fetch("owner/chats@~parquet/default/t*/*.parquet", tmp_path)[1][0] == b"PAR1 test"
    hub.datasets["owner/chats"].branches["v1"] = {"c.jsonl": b"old\n"}
    assert fetch("owner/chats@v1/c.jsonl", tmp_path)[1] == [b"old\n"]
    commit = hub.datasets["owner/chats"].commit("v1")
    hub.datasets["owner/chats"].branches[commit] = {"c.jsonl": b"old\n"}
    assert fetch(f"owner/chats@{commit}/c.jsonl", tmp_path)[1] == [b"old\n"]


def test_a_new_commit_is_fetched_and_named(hub: StubHub, tmp_path: Path) -> None:
    fetch("owner/chats/data", tmp_path)
    before = hub.datasets["owner/chats"].commit("main")
    hub.datasets["owner/chats"].branches["main"]["data/b.jsonl"] = b"new\n"
    _, contents, said = fetch("owner/chats/data", tmp_path)
    assert contents == [b"a\n", b"new\n"]
    after = hub.datasets["owner/chats"].commit("main")
    assert f"at commit {after[:12]}, before: {before[:12]}; " in said[-1]


def test_without_network_the_last_commit_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "owner/chats?split=train"
    with stub_hub() as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url)
        stub.datasets["owner/chats"] = chats()
        names, contents, _ = fetch(name, tmp_path)
    again = fetch(name, tmp_path)
    assert again[:2] == (names, contents)
    assert "no network; commit" in again[2][0]
    with pytest.raises(UserError, match="the Hub cannot be reached .* no earlier run has downloaded all"):
        fetch("owner/chats?split=test", tmp_path)
    commit_directory = hub_datasets.fetch(f"hf://datasets/{name}", tmp_path, list)[0].parent
    (commit_directory / names[0]).unlink()
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        fetch(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/chat", "the Hub has no data set 'owner/chat', or it is private .* HF_TOKEN"),
        ("owner/chats", "names several splits .* allowed: .split=test, .split=train$"),
        ("owner/chats?split=dev", "names no split .* allowed: .split=test, .split=train$"),
        ("owner/chats@v9/c.jsonl", "has no revision 'v9'"),
        ("owner/chats/d.jsonl", "has no file; its repository holds: c.jsonl, data/a.jsonl, data/b.jsonl"),
        ("owner/raw?split=train", "no Parquet conversion .* hf://datasets/owner/raw/PATH"),
        ("owner/..?split=train", r"cannot be fetched \(HFValidationError"),
        ("owner/gated/a.jsonl", "is gated: accept its terms on https://.*/owner/gated and set .* HF_TOKEN"),
    ],
)
def test_names_that_lead_nowhere(hub: StubHub, tmp_path: Path, name: str, message: str) -> None:
    hub.datasets["owner/raw"] = StubDataset({"main": {"a.jsonl": b"a\n"}})
    hub.datasets["owner/gated"] = StubDataset({"main": {"a.jsonl": b"a\n"}}, gated="manual")
    with pytest.raises(UserError, match=message):
        hub_datasets.resolve(f"hf://datasets/{name}", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_token_goes_to_the_hub_and_into_no_message(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.datasets["owner/gated"] = StubDataset({"main": {"a.jsonl": b"a\n"}}, gated="auto")
    with pytest.raises(UserError, match="is gated") as failure:
        fetch("owner/gated/a.jsonl", tmp_path)
    _, _, said = fetch("owner/chats/c.jsonl", tmp_path)
    assert "Bearer hf_secret" in hub.tokens
    written = [path.read_text() for path in tmp_path.rglob("*.json")]
    assert "hf_secret" not in json.dumps([str(failure.value), said, written, capfd.readouterr()])


@pytest.mark.parametrize("commit", ["../../../escaped", "/tmp/escaped", None, "main"])
def test_a_commit_that_would_be_a_path_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    info = SimpleNamespace(sha=commit, gated=False, siblings=[])
    api = SimpleNamespace(dataset_info=lambda *_, **__: info)
    monkeypatch.setattr("dflash_core.data.hub_datasets._api", lambda: api)
    with pytest.raises(UserError, match="the Hub names the commit .*; allowed: 40 hex digits"):
        hub_datasets.resolve("hf://datasets/owner/chats/a.jsonl", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ({"license": ["mit", "other"]}, "mit, other"),
        ({"license": {"a": 1}}, "{'a': 1}"),
        ({"license": "mit\x1b[31m\n"}, "mit\\x1b[31m\\n"),
        ({"license": None}, "none named"),
    ],
)
def test_a_card_may_hold_anything(hub: StubHub, tmp_path: Path, card: dict[str, Any], licence: str) -> None:
    hub.datasets["owner/chats"].card = card
    assert fetch("owner/chats/c.jsonl", tmp_path)[2][-1].endswith(f"; licence: {licence}")


def test_what_the_hub_names_leads_nowhere_else(hub: StubHub, tmp_path: Path) -> None:
    hub.datasets["owner/bad"] = StubDataset({"main": {"../../x.jsonl": b"x\n", "\x1b.jsonl": b"x\n"}})
    with pytest.raises(UserError, match=r"cannot be fetched \(ValueError: Invalid filename") as failure:
        fetch("owner/bad/../../x.jsonl", tmp_path)
    with pytest.raises(UserError, match=r"its repository holds: \\x1b.jsonl"):
        fetch("owner/bad/none.jsonl", tmp_path)
    assert "reached" not in str(failure.value)
    assert not list(tmp_path.parent.glob("x*"))


def test_bytes_other_than_those_announced_are_removed(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = hub_stub._answer

    def damaged(stub: StubHub, path: str) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = answer(stub, path)
        return status, headers, b"X\n" if body == b"c\n" else body

    monkeypatch.setattr(hub_stub, "_answer", damaged)
    with pytest.raises(UserError, match="the bytes of 'c.jsonl' are not those that the Hub announced"):
        fetch("owner/chats/c.jsonl", tmp_path)
    monkeypatch.setattr(hub_stub, "_answer", answer)
    assert fetch("owner/chats/c.jsonl", tmp_path)[1] == [b"c\n"]


def test_a_download_over_the_limit_is_refused_before_its_first_byte(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.download_limit_gb: .* in 2 files; allowed: up to 1e-08 GB"):
        hub_datasets.fetch("hf://datasets/owner/chats?split=train", tmp_path, limit_gb=1e-8)
    assert hub.downloads() == []
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'a/b' has 1000000000\.000 GB in 2 files, and .* GB free; allowed"):
        check_download("a/b", [10**18, None], 1e12, tmp_path, field="target", say=print)
