"""Data sets of the Hugging Face Hub as local files: the `hf://` names of `hub_names.py` in `data.files`.

A branch or tag is resolved to a commit once per run, with one request; files are downloaded at this commit
and kept under `<storage_root>/hub/`. Without network, the commit and files of the last run are used. Access
tokens come from the environment, are read by huggingface_hub alone, and are never printed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.data.download_size import check_download
from dflash_core.data.hub_names import ALLOWED, HubName, local_names, parse, path_files, shown, split_files
from dflash_core.errors import UserError
from dflash_core.files import bytes_digest, complete_file, file_sha256, write_json

_REQUEST_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A name at one commit."""

    repository: str
    commit: str
    # Paths in the repository, sorted.
    files: tuple[str, ...]
    # As the data set card names it; "" where it names none.
    licence: str
    # Bytes of each file, where the Hub names them.
    sizes: tuple[int | None, ...] = ()
    # Read from the record of the last run, for lack of network.
    is_recorded: bool = False


def resolve(text: str, storage_root: Path) -> Resolved:
    """Return commit and files of a name, by one request; nothing is downloaded or written.

    Raises:
        UserError: no such data set, revision, split or file, no access, or no network and no earlier run
            that downloaded the files.
    """
    name = parse(text)
    try:
        info = _api().dataset_info(
            name.repository, revision=name.revision, timeout=_REQUEST_SECONDS, files_metadata=True
        )
    except Exception as error:
        if not _is_unreachable(error):
            raise UserError(_reason(error, name)) from error
        recorded = _recorded(name, storage_root)
        if recorded is None:
            raise UserError(_reason(error, name)) from error
        return recorded
    if info.gated and not _has_token():
        raise UserError(_gated(name))
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        # It becomes the name of a directory.
        raise UserError(
            f"data.files: {text!r}: the Hub names the commit {info.sha!r:.60}; allowed: 40 hex digits"
        )
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    listed = sorted(sizes)
    files = split_files(name, listed) if name.path is None else path_files(name, name.path, listed)
    return Resolved(
        repository=name.repository,
        commit=str(info.sha),
        files=tuple(files),
        licence=_licence(info),
        sizes=tuple(sizes[file] for file in files),
    )


def fetch(
    text: str, storage_root: Path, say: Callable[[str], object] = print, *, limit_gb: float = math.inf
) -> list[Path]:
    """Return the local files of a name; those that are missing are downloaded.

    Args:
        text: the name.
        storage_root: files and commits are kept in `hub/` below it.
        say: called with a line before a download, and one per new commit, which names the data set's licence.
        limit_gb: a larger download is refused.

    Raises:
        UserError: as `resolve`, or a download is too large or failed.
    """
    resolved = resolve(text, storage_root)
    name, last = parse(text), _recorded(parse(text), storage_root)
    targets = _local_paths(resolved, storage_root)
    if resolved.is_recorded:
        say(f"{text}: no network; commit {resolved.commit[:12]} of the last run is used")
        return targets
    sizes = _recorded_sizes(name, storage_root, resolved.commit)
    missing = [i for i, path in enumerate(resolved.files) if not _is_whole(targets[i], sizes.get(path))]
    if missing:
        storage_root.mkdir(mode=0o700, parents=True, exist_ok=True)
        announced = [resolved.sizes[i] for i in missing]
        check_download(text, announced, limit_gb, storage_root, field="data", say=say)
    for i in missing:
        _download(name, resolved, resolved.files[i], targets[i], storage_root)
    if last is None or last.commit != resolved.commit or not sizes:
        moved = f", before: {last.commit[:12]}" if last else ""
        licence = resolved.licence or _licence_of_card(name) or "none named"
        say(f"{text}: {len(targets)} files at commit {resolved.commit[:12]}{moved}; licence: {licence}")
        sizes = {path: target.stat().st_size for path, target in zip(resolved.files, targets)}
        record: dict[str, Any] = {"name": text, "commit": resolved.commit, "files": resolved.files}
        record |= {"licence": licence, "sizes": sizes}
        write_json(_record_path(name, storage_root), record)
    return targets


def _local_paths(resolved: Resolved, storage_root: Path) -> list[Path]:
    directory = _directory(resolved.repository, storage_root) / resolved.commit
    return [directory / name for name in local_names(resolved.repository, resolved.files)]


def _directory(repository: str, storage_root: Path) -> Path:
    return storage_root / "hub" / repository.replace("/", "--")


def _record_path(name: HubName, storage_root: Path) -> Path:
    return _directory(name.repository, storage_root) / f"{bytes_digest(name.text.encode())}.json"


def _recorded(name: HubName, storage_root: Path) -> Resolved | None:
    """Return what the last run downloaded for a name; None if there is none, or if a file is gone."""
    try:
        record: dict[str, Any] = json.loads(_record_path(name, storage_root).read_text(encoding="utf-8"))
        resolved = Resolved(
            repository=name.repository,
            commit=record["commit"],
            files=tuple(record["files"]),
            licence=record["licence"],
            is_recorded=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sizes = _recorded_sizes(name, storage_root, resolved.commit)
    targets = zip(resolved.files, _local_paths(resolved, storage_root))
    return resolved if all(_is_whole(target, sizes.get(path)) for path, target in targets) else None


def _recorded_sizes(name: HubName, storage_root: Path, commit: str) -> dict[str, int]:
    """Return the bytes of each file that the last run downloaded of a commit, where they were recorded."""
    try:
        record = json.loads(_record_path(name, storage_root).read_text(encoding="utf-8"))
        return dict(record["sizes"]) if record["commit"] == commit else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _download(name: HubName, resolved: Resolved, path: str, target: Path, storage_root: Path) -> None:
    """Download one file; `target` appears complete or not at all."""
    try:
        cached = _api().hf_hub_download(
            name.repository,
            path,
            repo_type="dataset",
            revision=resolved.commit,
            cache_dir=storage_root / "hub" / "cache",
            # A damaged file may be a hard link to the cache's.
            force_download=target.exists(),
            etag_timeout=_REQUEST_SECONDS,
        )
    except Exception as error:
        raise UserError(_reason(error, name)) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    # The cache holds symbolic links to files that are named by their digest.
    real = Path(cached).resolve()
    # Large files are named by their sha256, which the Hub announced and nothing has checked.
    if re.fullmatch(r"[0-9a-f]{64}", real.name) and file_sha256(real) != real.name:
        real.unlink()
        raise UserError(
            f"data.files: {name.text!r} cannot be fetched: the bytes of {path!r} are not those that the Hub "
            "announced (sha256 differs), so they were removed. Run again"
        )
    with complete_file(target) as temporary:
        try:
            os.link(real, temporary)
        except OSError:
            shutil.copyfile(real, temporary)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _licence(info: Any) -> str:
    """Return the licence that the card of a data set names, else ""; the card may hold anything."""
    named = (info.card_data or {}).get("license")
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return shown(map(str, named if isinstance(named, list) else [named] if named else tags))


def _licence_of_card(name: HubName) -> str:
    """Return the licence by the card on the main branch: other branches need not hold the card."""
    try:
        return _licence(_api().dataset_info(name.repository, timeout=_REQUEST_SECONDS))
    except Exception:
        return ""


def _is_unreachable(error: Exception) -> bool:
    """Return True if the Hub did not answer, or answered that it cannot now."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, ValueError) and not isinstance(error, OSError | json.JSONDecodeError):
        # A name that huggingface_hub refuses.
        return False
    if not isinstance(error, HfHubHTTPError):
        return True
    return error.response is not None and (
        error.response.status_code >= 500 or error.response.status_code == 429
    )


def _gated(name: HubName) -> str:
    page = f"https://huggingface.co/datasets/{name.repository}"
    return (
        f"data.files: {name.text!r} is gated: accept its terms on {page} and set the environment variable "
        "HF_TOKEN to a token of that account"
    )


def _reason(error: Exception, name: HubName) -> str:
    """Return the message for a failed request."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return _gated(name)
    if isinstance(error, errors.RevisionNotFoundError):
        if name.path is None:
            return (
                f"data.files: {name.text!r} has no Parquet conversion on the Hub; allowed: its files, "
                f"hf://datasets/{name.repository}/PATH, such as hf://datasets/{name.repository}/**/*.jsonl"
            )
        return f"data.files: {name.text!r} has no revision {name.revision!r}; allowed: {ALLOWED}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"data.files: {name.text!r}: the Hub has no data set {name.repository!r}, or it is private and "
            "the environment variable HF_TOKEN holds no token for it"
        )
    text = str(error).strip() or type(error).__name__
    reason = f"{type(error).__name__}: {text.splitlines()[0]}"
    if _is_unreachable(error):
        return (
            f"data.files: {name.text!r} cannot be fetched: the Hub cannot be reached ({reason}), and no "
            "earlier run has downloaded all of its files"
        )
    return f"data.files: {name.text!r} cannot be fetched ({reason})"
