"""Errors of the operating system at the border of a command: one message with the next step."""

from __future__ import annotations

import errno

from dflash_core.errors import UserError

FULL = (
    "free space there, for example with `python -m flows.prune NAME`, and run the same command again: it "
    "continues after the last complete stage or checkpoint"
)
REFUSED = "allowed: files under storage_root that belong to the user who runs the flows (chown, chmod)"
FAILED = "once the file system answers again, run the same command: it continues where it was"
NEXT_STEPS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: REFUSED,
    errno.EACCES: REFUSED,
    errno.EPERM: REFUSED,
    errno.ESTALE: FAILED,
    errno.EIO: FAILED,
    errno.EMFILE: "raise the limit of open files (`ulimit -n`) and run the same command again",
}


def mistake_of(error: BaseException | None) -> UserError | None:
    """Return the message for the error of the operating system behind an exception, or None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NEXT_STEPS:
            place = f"{error.filename}: " if error.filename else ""
            return UserError(f"{place}{error.strerror or error}; {NEXT_STEPS[error.errno]}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
