"""Size of what a name on the Hugging Face Hub would download, checked and reported before the first byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_core.errors import UserError


def check_download(
    what: str,
    sizes: Sequence[int | None],
    limit_gb: float,
    place: Path,
    *,
    field: str,
    say: Callable[[str], object],
) -> None:
    """Report the size of a download before it starts.

    Args:
        what: name on the Hub.
        sizes: bytes of each file, as the Hub names them; None where it does not.
        limit_gb: in 10^9 bytes.
        place: an existing directory on the file system that receives the files.
        field: the section of the settings, `data` or `target`.
        say: called with one line.

    Raises:
        UserError: the files are larger than the limit, or than the free space.
    """
    total, free = sum(size or 0 for size in sizes), shutil.disk_usage(place).free
    unknown = f" and {sizes.count(None)} of unknown size" if None in sizes else ""
    size = f"{total / 1e9:.3f} GB in {len(sizes)} files"
    if total > limit_gb * 1e9:
        raise UserError(
            f"{field}.download_limit_gb: {what!r} has {size}; allowed: up to "
            f"{limit_gb:g} GB. Name fewer files, or raise the limit"
        )
    if total > free:
        raise UserError(
            f"{what!r} has {size}, and {place} has {free / 1e9:.3f} GB free; "
            "allowed: what fits. Make room, or take another storage_root"
        )
    say(f"{what}: downloading {len(sizes)} files, {total / 1e9:.3f} GB{unknown}")
