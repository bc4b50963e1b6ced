"""The files that settings name, checked before anything starts: a missing one is reported within a second."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.errors import UserError

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")


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


def _is_data_file(path: Path, directory: Path) -> bool:
    """Return whether a path is a data file, neither hidden nor in a hidden directory such as .git."""
    is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
    return path.name.lower().endswith(DATA_SUFFIXES) and path.is_file() and not is_hidden


def check_files(config: RunConfig) -> None:
    """Check that every file and directory that the settings name exists.

    Raises:
        UserError: the first one that does not exist.
    """
    find_files(config.data.files)
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
    path = Path(files[0])
    while any(character in path.name for character in "*?["):
        path = path.parent
    name = path.name.split(".")[0] or "data"
    return name if len(files) == 1 else f"{name}-and-{len(files) - 1}-more"
