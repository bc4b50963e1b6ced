"""Digests of files that are remembered by size and modification time."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import UserError
from tasks.storage.file_digests import FileDigests, resolution_seconds


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    old = time.time_ns() - 10_000_000_000
    os.utime(path, ns=(old, old))
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    # sha256 of "one".
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    digests.save()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert FileDigests(tmp_path).of(path) == first
    monkeypatch.undo()
    os.utime(path, ns=(old + 1, old + 1))
    assert FileDigests(tmp_path).of(path) == first


@pytest.mark.parametrize("kind", ["written", "renamed"])
def test_a_time_that_was_set_back_hides_no_change(tmp_path: Path, kind: str) -> None:
    """As by `cp -p` and `rsync -t`: another text of the same size and the same time of modification."""
    path, old = tmp_path / "a.jsonl", time.time_ns() - 10_000_000_000
    path.write_text("one")
    os.utime(path, ns=(old, old))
    digests = FileDigests(tmp_path)
    digests.of(path)
    other = path if kind == "written" else tmp_path / "other"
    other.write_text("two")
    os.utime(other, ns=(old, old))
    other.rename(path)
    assert digests.of(path) == hashlib.sha256(b"two").hexdigest()


def test_a_file_that_changes_while_it_is_read_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")

    def append_meanwhile(file: Any, _: str) -> Any:
        read = hashlib.sha256(file.read())
        path.write_text("one and two")
        return read

    monkeypatch.setattr(hashlib, "file_digest", append_meanwhile)
    digests = FileDigests(tmp_path)
    with pytest.raises(UserError, match="a.jsonl' changed while it was read"):
        digests.of(path)
    assert not digests.is_changed


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.jsonl' cannot be read: .*No such file"):
        FileDigests(tmp_path).of(tmp_path / "none.jsonl")


@pytest.mark.parametrize("mtime_ns, seconds", [(5_000_000_000, 2.0), (5_000_000_001, 0.05)])
def test_the_resolution_of_a_time_in_whole_seconds_is_two_seconds(mtime_ns: int, seconds: float) -> None:
    assert resolution_seconds(mtime_ns) == seconds


def test_a_file_written_just_now_is_read_once_its_time_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten at the same length within the same tick, its last text counts; and nothing is read twice."""
    path, waited = tmp_path / "a.jsonl", []
    path.write_text("new")
    # Not a whole second.
    written = time.time_ns() // 1000 * 1000 + 1
    os.utime(path, ns=(written, written))

    def rewrite_meanwhile(seconds: float) -> None:
        waited.append(seconds)
        path.write_text("now")
        os.utime(path, ns=(written, written))

    monkeypatch.setattr(time, "sleep", rewrite_meanwhile)
    monkeypatch.setattr(time, "time_ns", lambda: written + 1_000_000)
    digests = FileDigests(tmp_path)
    assert digests.of(path) == hashlib.sha256(b"now").hexdigest()
    # Up to the time of change, which the kernel sets.
    assert waited == [pytest.approx(0.049, abs=0.02)]
    digests.save()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    again = FileDigests(tmp_path)
    assert again.of(path) == hashlib.sha256(b"now").hexdigest()
    assert not again.is_changed


def test_a_file_from_the_future_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    future = time.time_ns() + 3_600_000_000_000
    os.utime(path, ns=(future, future))
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    path.write_text("two")
    os.utime(path, ns=(future, future))
    assert digests.of(path) != first


def test_a_hard_link_to_a_file_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    digests.save()
    os.link(path, tmp_path / "b.jsonl")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    again = FileDigests(tmp_path)
    assert again.of(path) == first
    assert not again.is_changed
