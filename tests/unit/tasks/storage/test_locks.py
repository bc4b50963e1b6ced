"""Locks, also on file systems that have none."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tasks.storage import locks


def test_a_second_lock_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        locks.lock(first, wait=True)
        with pytest.raises(BlockingIOError):
            locks.lock(second, wait=False)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_work_continues_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("w") as file:
        locks.lock(file, wait=False)
    [warning] = caplog.messages
    assert f"{tmp_path / 'lock'} cannot be locked ({os.strerror(number)})" in warning


def test_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="input/output"):
        locks.lock(file, wait=True)
