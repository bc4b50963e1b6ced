"""The files that settings name, checked before anything starts: a missing one is reported within a second."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.errors import UserError

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files behind names, directories and globs: absolute, sorted, each once.

    A directory is searched for data files at any depth; hidden ones are left out.

    Raises:
        UserError: a name that matches nothing, a directory without data files, a file or directory that
            cannot be read, or a link that points nowhere.
    """
    files: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if os.path.isdir(path):
            matches = sorted(_data_files(path))
            allowed = f"a directory with files ending in {', '.join(DATA_SUFFIXES)}"
        else:
            matches = [path] if os.path.lexists(path) else _glob(path)
            allowed = "a file, a directory or a glob that matches files"
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            _check_parents(path, "data.files")
            raise UserError(f"data.files: {pattern!r} has no file; allowed: {allowed}")
        for match in matches:
            _check_file(match, "data.files")
        files.update(match.resolve() for match in matches)
    return sorted(files)


def _data_files(directory: Path) -> Iterator[Path]:
    """Yield the data files below a directory that are neither hidden nor in a hidden one such as .git."""
    for parent, directories, names in _walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(DATA_SUFFIXES) and not name.startswith("."):
                yield Path(parent, name)


def _walk(directory: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk through a directory, and fail where a part of it cannot be read."""

    def fail(error: OSError) -> None:
        raise _unreadable(error.filename, "data.files", str(error.strerror)) from error

    for entry in os.walk(directory, onerror=fail):
        if not os.access(entry[0], os.X_OK):
            raise _unreadable(entry[0], "data.files")
        yield entry


def _glob(path: Path) -> list[Path]:
    """Return what a glob matches; fail where a directory that it looks through cannot be read."""
    for pattern in path.parents:
        for directory in sorted(glob.glob(str(pattern), recursive=True)):
            if os.path.isdir(directory) and not os.access(directory, os.R_OK | os.X_OK):
                raise _unreadable(directory, "data.files")
        if not glob.has_magic(str(pattern)):
            break
    return sorted(map(Path, glob.glob(str(path), recursive=True)))


def _unreadable(path: str | Path, field: str, reason: str = "no permission") -> UserError:
    return UserError(
        f"{field}: {str(path)!r} cannot be read: {reason}; allowed: files that can be read, and directories "
        "whose files can be listed and opened"
    )


def _check_parents(path: Path, field: str) -> None:
    """Raise for the first parent of a path that cannot be entered: what it holds is not known."""
    for parent in reversed(path.parents):
        if os.path.isdir(parent) and not os.access(parent, os.X_OK):
            raise _unreadable(parent, field)


def _check_file(path: Path, field: str) -> None:
    """Raise unless a path is a file that can be read."""
    if path.is_symlink() and not os.path.exists(path):
        raise UserError(
            f"{field}: {str(path)!r} is a link to {os.readlink(path)!r}, which does not exist; "
            "allowed: files, and links to files"
        )
    if not os.path.isfile(path):
        raise UserError(f"{field}: {str(path)!r} is not a file; allowed: files, and links to files")
    if not os.access(path, os.R_OK):
        raise _unreadable(path, field)


def check_files(config: RunConfig) -> None:
    """Check that every file and directory that the settings name exists and can be read.

    Raises:
        UserError: the first one that does not exist or cannot be read.
    """
    find_files(config.data.files)
    template, init_from = config.data.chat_template, config.training.init_from
    if template is not None:
        _check_named(Path(template), "data.chat_template", "a Jinja file")
    for name in config.evaluation.prompts:
        _check_named(Path(name).expanduser(), "evaluation.prompts", "JSONL files of prompts")
    if init_from is not None and not os.path.isdir(init_from):
        raise UserError(
            f"training.init_from: {init_from!r} does not exist; allowed: an exported drafter or a run"
        )


def _check_named(path: Path, field: str, allowed: str) -> None:
    if not os.path.lexists(path):
        _check_parents(path, field)
        raise UserError(f"{field}: {str(path)!r} does not exist; allowed: {allowed}")
    _check_file(path, field)


def data_name(files: Sequence[str]) -> str:
    """Return a word for the data in names of runs.

    `chats` for `data/chats/*.jsonl`, `chats-and-2-more` for three names, `stdlib` for none.
    """
    if not files:
        return "stdlib"
    path = Path(files[0])
    while any(character in path.name for character in "*?["):
        path = path.parent
    name = path.name.split(".")[0] or "data"
    return name if len(files) == 1 else f"{name}-and-{len(files) - 1}-more"
