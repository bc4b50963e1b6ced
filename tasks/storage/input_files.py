"""The files that settings name, checked before anything starts: a missing one is reported within a second."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.data import hub_datasets
from dflash_core.data.hub_names import DATA_SUFFIXES, is_hub_name, repository_of
from dflash_core.errors import UserError


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files behind names, directories and globs: absolute, sorted, each once.

    A directory is searched for data files at any depth; hidden ones are left out.

    Raises:
        UserError: a name that matches nothing, or a directory without data files.
    """
    files: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            matches = [p for p in path.rglob("*") if _is_data_file(p, path)]
            allowed = f"a directory with files ending in {', '.join(DATA_SUFFIXES)}"
        else:
            names = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
            matches = [p for p in names if p.is_file()]
            allowed = "a file, a directory or a glob that matches files"
        if not matches:
            raise UserError(f"data.files: {pattern!r} has no file; allowed: {allowed}")
        files.update(p.resolve() for p in matches)
    return sorted(files)


def fetch_files(names: Iterable[str], storage_root: Path, say: Callable[[str], object]) -> list[Path]:
    """Return the files behind `data.files`; those of data sets on the Hub are downloaded first.

    Args:
        names: as in `find_files`, or `hf://` names.
        storage_root: absolute; downloads are kept below it.
        say: called with a line per data set that is new or has changed.

    Raises:
        UserError: a name that matches nothing, or a data set that cannot be fetched.
    """
    names = list(names)
    hub = {
        path for name in names if is_hub_name(name) for path in hub_datasets.fetch(name, storage_root, say)
    }
    return sorted({*find_files(name for name in names if not is_hub_name(name)), *hub})


def _is_data_file(path: Path, directory: Path) -> bool:
    """Return whether a path is a data file, neither hidden nor in a hidden directory such as .git."""
    is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
    return path.name.lower().endswith(DATA_SUFFIXES) and path.is_file() and not is_hidden


def check_files(config: RunConfig) -> None:
    """Check that every file, directory and data set that the settings name exists; nothing is downloaded.

    Raises:
        UserError: the first one that does not exist.
    """
    find_files(name for name in config.data.files if not is_hub_name(name))
    for name in filter(is_hub_name, config.data.files):
        hub_datasets.resolve(name, Path(config.storage_root).expanduser().resolve())
    template, init_from = config.data.chat_template, config.training.init_from
    if template is not None and not Path(template).is_file():
        raise UserError(f"data.chat_template: {template!r} does not exist; allowed: a Jinja file")
    for name in config.evaluation.prompts:
        if not Path(name).expanduser().is_file():
            raise UserError(f"evaluation.prompts: {name!r} does not exist; allowed: JSONL files of prompts")
    if init_from is not None and not Path(init_from).is_dir():
        raise UserError(
            f"training.init_from: {init_from!r} does not exist; allowed: an exported drafter or a run"
        )


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
