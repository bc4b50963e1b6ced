"""Data sets that this package ships: `package://NAME` in `data.files` is the file packaged/NAME."""

from __future__ import annotations

from pathlib import Path

from dflash_core.errors import UserError

PREFIX = "package://"
DIRECTORY = Path(__file__).parent / "packaged"


def packaged_path(text: str) -> Path | None:
    """Return the file of a `package://` name, None for any other text.

    Raises:
        UserError: this package has no such file.
    """
    if not text.startswith(PREFIX):
        return None
    files = {PREFIX + path.name: path for path in sorted(DIRECTORY.glob("*.jsonl"))}
    if text not in files:
        raise UserError(f"data.files: {text!r} is not in this package; allowed: {', '.join(files)}")
    return files[text]
