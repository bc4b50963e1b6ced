"""An exported drafter as a directory: the names of its files and where to find it. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from dflash_core.errors import UserError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def drafter_directory(path: Path, *, field: str) -> Path:
    """Return the exported drafter at a path that names it or the directory of a run.

    Args:
        path: an exported drafter, or a run with one in `drafter/`.
        field: the setting that gave the path, for the message.

    Raises:
        UserError: there is none.
    """
    directory = path / "drafter" if (path / "drafter").is_dir() else path
    if not all((directory / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
        raise UserError(
            f"{field}: {str(path)!r} holds no drafter; allowed: a run's directory or an exported drafter"
        )
    return directory
