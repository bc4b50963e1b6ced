"""sha256 digests of files, remembered from run to run so that unchanged files are not read again.

A digest is known by path, size, and the times of the last modification and change. A file that is rewritten
within the resolution of these times looks unchanged, so a file is read only once they are older than that
resolution, and a file that changes while it is read fails: a remembered digest is always right. Price: a file
that was written just now delays its first digest by up to 2 seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.files import write_json


def resolution_seconds(mtime_ns: int) -> float:
    """Return an upper bound for the resolution of a modification time.

    It is 2 s for a time in whole seconds (FAT, old NFS), else 0.05 s: local Linux file systems take the time
    of the kernel's last tick, at most 10 ms ago.
    """
    return 2.0 if mtime_ns % 1_000_000_000 == 0 else 0.05


def _stamp(status: os.stat_result) -> list[int]:
    # A program can set the time of modification back, but not the time of change.
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, status.st_nlink]


def _is_same(stamp: list[int], known: list[int]) -> bool:
    """Return whether two stamps are of one content; a new hard link changes the time of change alone."""
    *content, ctime, num_links = stamp
    *known_content, known_ctime, known_links = known
    return content == known_content and (ctime == known_ctime or num_links != known_links)


@dataclass
class FileDigests:
    """Digests of files, kept in `<storage_root>/store/file_digests.json`."""

    storage_root: Path
    is_changed: bool = field(default=False, init=False)
    # path -> [*_stamp, sha256]
    _known: dict[str, list[Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # What cannot be read is computed again.
        try:
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            known = None
        self._known = known if isinstance(known, dict) else {}

    @property
    def _path(self) -> Path:
        return self.storage_root / "store" / "file_digests.json"

    def of(self, path: Path) -> str:
        """Return the file's sha256, 64 hex characters.

        Raises:
            UserError: the file cannot be read, or changes meanwhile.
        """
        try:
            return self._of(path)
        except OSError as error:
            raise UserError(f"{str(path)!r} cannot be read: {error}; allowed: a readable file") from error

    def _of(self, path: Path) -> str:
        status, name = path.stat(), str(path.resolve())
        known = self._known.get(name)
        if isinstance(known, list) and len(known) == 6 and _is_same(_stamp(status), known[:-1]):
            return str(known[-1])
        written = max(status.st_mtime_ns, status.st_ctime_ns)
        age = (time.time_ns() - written) / 1e9
        resolution = max(resolution_seconds(status.st_mtime_ns), resolution_seconds(written))
        if 0 <= age < resolution:
            time.sleep(resolution - age)
        with open(path, "rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise UserError(
                    f"{str(path)!r} changed while it was read; allowed: files that nothing writes to. "
                    "Run again when it is complete"
                )
        # A time in the future never grows old: such a file is read again each time.
        if age >= 0:
            self._known[name] = [*stamp, digest]
            self.is_changed = True
        return digest

    def save(self) -> None:
        """Write new digests to the file, if there are any."""
        if self.is_changed:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._known)
            self.is_changed = False
