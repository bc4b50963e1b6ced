"""The bytes of a file, checked against the digest that stands for them.

A stage's key holds the sha256 of a file. The file may change between that digest and the end of its reading:
it may be appended to, truncated, rewritten, or replaced. So the bytes are digested again while they are read,
and a file whose bytes are others fails. A replaced file is read to its end as it was opened.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

from dflash_core.data.raw_rows import CHUNK_BYTES
from dflash_core.errors import UserError


class SourceFile(io.RawIOBase):
    """An open file whose bytes are digested as they are read in order.

    Args:
        path: the file.
        digest: sha256 of the expected bytes, 64 hex characters; None: they are not checked.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path, digest: str | None = None) -> None:
        self.path, self._digest = path, digest
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise self.error(f"cannot be read: {error}") from error
        self._stamp = self._current_stamp()
        self._hasher: Any = hashlib.sha256()
        self._is_in_order = True

    def error(self, text: str) -> UserError:
        """Return an error that names the file."""
        return UserError(f"data.files: {str(self.path)!r} {text}")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes in order, and digest them."""
        count = self._file.readinto(buffer) or 0
        if self._digest is not None:
            self._hasher.update(memoryview(buffer)[:count])
        return count

    def random_access(self) -> io.FileIO:
        """Return the file for reading in any order; `verify` then reads it once more."""
        self._is_in_order = False
        return self._file

    def _current_stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        # Not the time of change: it moves when another file takes this one's name.
        return status.st_size, status.st_mtime_ns

    def has_changed(self) -> bool:
        """Return True if the open file was written to since it was opened."""
        return self._current_stamp() != self._stamp

    def changed_error(self) -> UserError:
        """Return the error of a file that changed."""
        return self.error(
            "changed while it was read, so none of its rows are kept; allowed: files that nothing writes to. "
            "Run again when it is complete"
        )

    def verify(self) -> None:
        """Read the rest of the file, and check that all bytes are those of the digest.

        Raises:
            UserError: they are not.
        """
        if self._digest is None:
            return
        if not self._is_in_order:
            self._file.seek(0)
            self._hasher = hashlib.sha256()
        buffer = bytearray(CHUNK_BYTES)
        while self.readinto(buffer):
            pass
        is_same = self._hasher.hexdigest() == self._digest
        # Bytes read in any order are known by the time of the last change alone.
        if not is_same or (not self._is_in_order and self.has_changed()):
            raise self.changed_error()

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):
            self._file.close()
        super().close()
