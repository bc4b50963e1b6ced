"""Locks between processes, by flock(2); a file system without them is reported, and work continues.

Some network file systems have no locks (NFS mounted with `nolock`, many FUSE and object stores). Then nothing
but the user prevents two processes from writing to the same place.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from typing import IO

UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}

log = logging.getLogger("prefect.train_dflash.locks")


def lock(file: IO[str], *, wait: bool) -> None:
    """Lock an open file until it is closed; without support by the file system, log a warning.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning(
            "%s cannot be locked (%s); let no second run use this storage root at the same time",
            file.name,
            error.strerror,
        )
