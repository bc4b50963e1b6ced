"""Errors of the operating system become one message with the next step."""

from __future__ import annotations

import errno
import os

import pytest

from flows.runtime.system_errors import mistake_of


@pytest.mark.parametrize(
    "number, step",
    [
        (errno.ENOSPC, "free space there"),
        (errno.EDQUOT, "free space there"),
        (errno.EROFS, "files under storage_root that belong to the user"),
        (errno.EACCES, "files under storage_root that belong to the user"),
        (errno.ESTALE, "once the file system answers again"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_the_error_behind_a_failure_is_named(number: int, step: str) -> None:
    try:
        try:
            raise OSError(number, os.strerror(number), "/runs/store/a")
        except OSError as error:
            raise RuntimeError("the task failed") from error
    except RuntimeError as failure:
        message = str(mistake_of(failure))
    assert message.startswith(f"/runs/store/a: {os.strerror(number)}; ")
    assert step in message


def test_other_failures_stay_what_they_are() -> None:
    assert mistake_of(RuntimeError("no")) is None
    assert mistake_of(FileNotFoundError(errno.ENOENT, "no such file", "a")) is None
