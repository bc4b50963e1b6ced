"""Digests of files that are remembered by size and modification time."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tasks.storage.file_digests import FileDigests, resolution_seconds


def test_file_digests_trust_size_and_time_only_when_the_file_was_at_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    old = time.time_ns() - 10_000_000_000
    os.utime(path, ns=(old, old))
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    # sha256 of "one".
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    digests.save()
    path.write_text("two")
    # The same size and the same time: the remembered digest counts.
    os.utime(path, ns=(old, old))
    assert FileDigests(tmp_path).of(path) == first
    os.utime(path, ns=(old + 1, old + 1))
    assert FileDigests(tmp_path).of(path) != first


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
    assert waited == [pytest.approx(0.049)]
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
