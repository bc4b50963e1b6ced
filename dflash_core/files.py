"""Files that appear complete or not at all, and digests of contents: one way each."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    temporary = _temporary(path)
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
def publish_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory next to `path` that takes its name, and its place, when the body succeeds.

    Also removes the temporary directories next to `path` whose process was killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Once per process: the directory may hold 100,000 others.
    _remove_leftovers(path.parent)
    temporary = _temporary(path)
    temporary.mkdir()
    old = _temporary(path)
    try:
        yield temporary
        if path.exists():
            # A directory cannot be renamed over one that holds files.
            os.replace(path, old)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name[:12]}-{os.getpid()}-{secrets.token_hex(4)}")


@functools.lru_cache(maxsize=1024)
def _remove_leftovers(directory: Path) -> None:
    for leftover in directory.glob(".*-*-*"):
        pid = leftover.name.split("-")[-2]
        if (
            pid.isdigit()
            and leftover.is_dir()
            and Path("/proc/self").exists()
            and not Path(f"/proc/{pid}").exists()
        ):
            shutil.rmtree(leftover, ignore_errors=True)
