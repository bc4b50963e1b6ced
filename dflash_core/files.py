"""Files that appear complete or not at all, and digests of contents: one way each."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_core.processes import start_of, this_process

# Host, pid and start of the process that writes it, see `temporary_name`.
_TEMPORARY = re.compile(r"\..*-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>[0-9a-f]{8})-[0-9a-f]{8}")


def content_digest(value: Any) -> str:
    """Return the 128-bit digest of JSON types, independent of the order of mapping keys: 32 hex characters.

    content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return bytes_digest(text.encode())


def new_hasher() -> hashlib.blake2b:
    """Return the hasher of all digests of this project, 128 bits, for contents that come in parts."""
    return hashlib.blake2b(digest_size=16)


def bytes_digest(*parts: bytes | memoryview) -> str:
    """Return the digest of some bytes in a row, 32 hex characters."""
    hasher = new_hasher()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file's bytes, 32 hex characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_hasher).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, 64 hex characters: the digest that other tools print."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` that takes its name when the body succeeds, else vanishes."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, complete or not at all."""
    with complete_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def publish_directory(path: Path, *, is_kept: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Yield an empty directory next to `path` that takes its name when the body succeeds, else vanishes.

    Also removes the temporary directories next to `path` whose process has ended.

    Args:
        path: a directory that is there already is replaced.
        is_kept: return True to keep the one that is there, made by another process meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Once per process: the directory may hold 100,000 others.
    _remove_leftovers_once(path.parent)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        while not _take_place(temporary, path):
            if is_kept():
                break
            _move_away(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(directory: Path, path: Path) -> bool:
    """Rename a directory unless another one with files has that name; return whether it was renamed."""
    try:
        os.rename(directory, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _move_away(path: Path) -> None:
    old = temporary_name(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, old)
    shutil.rmtree(old, ignore_errors=True)


def temporary_name(path: Path) -> Path:
    """Return a new hidden name next to `path` that names this process; see `remove_leftovers`."""
    process = this_process()
    owner = f"{_tag(process['host'])}-{process['pid']}-{_tag(process['started'])}"
    return path.with_name(f".{path.name[:12]}-{owner}-{secrets.token_hex(4)}")


def _tag(text: str | None) -> str:
    return bytes_digest(str(text).encode())[:8]


@functools.lru_cache(maxsize=1024)
def _remove_leftovers_once(directory: Path) -> None:
    remove_leftovers(directory)


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove and return the temporary files and directories in a directory whose process has ended.

    Those of other machines stay, since their processes cannot be checked from here.
    """
    removed = []
    for leftover in directory.glob(".*-*-*-*-*"):
        match = _TEMPORARY.fullmatch(leftover.name)
        if match is None or match["host"] != _tag(socket.gethostname()):
            continue
        if _tag(start_of(int(match["pid"]))) == match["started"]:
            continue
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
        removed.append(leftover)
    return removed
