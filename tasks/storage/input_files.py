"""The files that settings name, checked before anything starts: a missing one is reported within a second."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.data import hub_datasets
from dflash_core.data.hub_names import DATA_SUFFIXES, is_hub_name, repository_of
from dflash_core.data.packaged_files import packaged_path
from dflash_core.errors import UserError


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files behind names, directories, globs and `package://` names: absolute, sorted, each once.

    A directory is searched for data files at any depth; hidden ones are left out.

    Raises:
        UserError: a name that matches nothing, a directory without data files, a file or directory that
            cannot be read, or a link that points nowhere.
    """
    files: set[Path] = set()
    for pattern in patterns:
        # Unlike Path.expanduser, this leaves the name of an unknown user as it is.
        path = packaged_path(pattern) or Path(os.path.expanduser(pattern))
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


def fetch_files(
    names: Iterable[str], storage_root: Path, say: Callable[[str], object], *, limit_gb: float
) -> list[Path]:
    """Return the files behind `data.files`; those of data sets on the Hub are downloaded first.

    Args:
        names: as in `find_files`, or `hf://` names.
        storage_root: absolute; downloads are kept below it.
        say: called with a line per download, and per data set that is new or has changed.
        limit_gb: `data.download_limit_gb`.

    Raises:
        UserError: a name that matches nothing, or a data set that cannot be fetched.
    """
    names = list(names)
    hub = {
        path
        for name in filter(is_hub_name, names)
        for path in hub_datasets.fetch(name, storage_root, say, limit_gb=limit_gb)
    }
    return sorted({*find_files(name for name in names if not is_hub_name(name)), *hub})


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
    """Return what a glob matches; fail where a directory that it looks through cannot be read.

    `**` does not follow links to directories, which may form loops.
    """
    found = [Path(path.anchor)]
    for part in path.relative_to(path.anchor).parts:
        found = [match for directory in found for match in _matches(directory, part)]
    # Several `**` find a file in several ways.
    return sorted(set(found))


def _matches(directory: Path, part: str) -> Iterator[Path]:
    """Yield what one part of a glob matches in a directory; names that begin with a dot only if it does."""
    if not os.path.isdir(directory):
        return
    # A directory may be called `run[1]`.
    has_magic = glob.has_magic(part) and not ("[" in part and os.path.lexists(directory / part))
    if not os.access(directory, os.R_OK | os.X_OK if has_magic else os.X_OK):
        raise _unreadable(directory, "data.files")
    if not has_magic:
        if os.path.lexists(directory / part):
            yield directory / part
    elif part == "**":
        for parent, directories, names in _walk(directory):
            directories[:] = [name for name in directories if not name.startswith(".")]
            yield Path(parent)
            yield from (Path(parent, name) for name in names if not name.startswith("."))
    else:
        for name in fnmatch.filter(os.listdir(directory), part):
            if not name.startswith(".") or part.startswith("."):
                yield directory / name


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
    """Check that what the settings name exists and can be read; nothing is downloaded.

    Raises:
        UserError: the first one that does not exist or cannot be read.
    """
    find_files(name for name in config.data.files if not is_hub_name(name))
    for name in filter(is_hub_name, config.data.files):
        hub_datasets.resolve(name, Path(config.storage_root).expanduser().resolve())
    template, init_from = config.data.chat_template, config.training.init_from
    if template is not None:
        _check_named(Path(template), "data.chat_template", "a Jinja file")
    for name in config.evaluation.prompts:
        _check_named(Path(os.path.expanduser(name)), "evaluation.prompts", "JSONL files of prompts")
    engine = config.evaluation.engine_python
    if config.evaluation.engine == "vllm" and not os.path.isfile(engine):
        raise UserError(
            f"evaluation.engine_python: {engine!r} does not exist; allowed: python of an environment with "
            "vLLM (make serve-env)"
        )
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
    # A data set on the Hub is called by its own name: hf://datasets/owner/chats@main/a.jsonl -> chats.
    path = Path(repository_of(files[0]) or files[0])
    while any(character in path.name for character in "*?["):
        path = path.parent
    name = path.name.split(".")[0] or "data"
    return name if len(files) == 1 else f"{name}-and-{len(files) - 1}-more"
