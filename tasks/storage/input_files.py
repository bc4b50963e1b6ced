"""The files that settings name, found before anything is started: a missing one is told within a second."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from dflash_core.config import RunConfig
from dflash_core.errors import UserError

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Files behind names, directories (searched for data files, hidden ones left out) and globs; absolute, sorted,
    each once.

    Raises:
        UserError: a name that matches nothing, or a directory without data files.
    """
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            here = {
                p for p in path.rglob("*") if p.name.lower().endswith(DATA_SUFFIXES) and _is_shown(p, path)
            }
            allowed = f"a directory with files ending in {', '.join(DATA_SUFFIXES)}"
        elif path.is_file():
            here, allowed = {path}, ""
        else:
            here = {Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()}
            allowed = "a file, a directory or a glob that matches files"
        if not here:
            raise UserError(f"data.files: {pattern!r} has no file; allowed: {allowed}")
        found |= {p.resolve() for p in here}
    return sorted(found)


def _is_shown(path: Path, directory: Path) -> bool:
    """A file that is not hidden, nor in a hidden directory such as .git or .cache."""
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)


def check_files(config: RunConfig) -> None:
    """Raises UserError for the first file or directory of the settings that does not exist."""
    find_files(config.data.files)
    if config.data.chat_template is not None and not Path(config.data.chat_template).is_file():
        raise UserError(
            f"data.chat_template: {config.data.chat_template!r} does not exist; allowed: a Jinja file"
        )
    for name in config.evaluation.prompts:
        if not Path(name).expanduser().is_file():
            raise UserError(f"evaluation.prompts: {name!r} does not exist; allowed: JSONL files of prompts")
    if config.training.init_from is not None and not Path(config.training.init_from).is_dir():
        raise UserError(
            f"training.init_from: {config.training.init_from!r} does not exist; allowed: an exported drafter "
            "or a run"
        )
