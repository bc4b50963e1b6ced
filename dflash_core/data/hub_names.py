"""Names of data sets on the Hugging Face Hub, and the files that they mean. No request is made here.

| name | files |
|---|---|
| `hf://datasets/OWNER/NAME?split=train` | a split of the Hub's Parquet conversion (`refs/convert/parquet`) |
| `hf://datasets/OWNER/NAME?config=en&split=train` | the same, of one of several configurations |
| `hf://datasets/OWNER/NAME` | the same, where there is one split only |
| `hf://datasets/OWNER/NAME[@REVISION]/PATH` | a file, the data files of a directory, or those of a glob |
| `hf://datasets/OWNER/NAME@~parquet/PATH` | the same, of the Parquet conversion |
"""

from __future__ import annotations

import fnmatch
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_core.errors import UserError
from dflash_core.files import bytes_digest

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".zst")
PREFIX = "hf://"
ALLOWED = "hf://datasets/OWNER/NAME?split=SPLIT or hf://datasets/OWNER/NAME[@REVISION]/PATH"
_CONVERTED = "refs/convert/parquet"
_NAME = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/convert/[\w.-]+|refs/pr/\d+|[^/?@]+))?(/(?P<path>[^?]+?)/?)?(\?(?P<query>.*))?"
)
_SUFFIXES = re.compile("(" + "|".join(map(re.escape, DATA_SUFFIXES)) + ")+$")

# File systems allow 255, digest and suffixes included.
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A parsed name; see the module's docstring."""

    text: str
    repository: str
    # A branch, tag or commit.
    revision: str
    # File, directory or glob; None: a split of the Parquet conversion.
    path: str | None
    split: str | None
    config: str | None


def is_hub_name(text: str) -> bool:
    """Return True for a name of this module, right or wrong."""
    return text.startswith(PREFIX)


def repository_of(text: str) -> str | None:
    """Return OWNER/NAME of a name of this module, right or wrong; None for any other text."""
    match = re.match(PREFIX + r"datasets/([^/]+/[^/@?]+)", text)
    return match[1] if match else None


def parse(text: str) -> HubName:
    """Parse a name, without any request.

    Raises:
        UserError: it has another form.
    """
    match = _NAME.fullmatch(text)
    query = urllib.parse.parse_qsl((match and match["query"]) or "", keep_blank_values=True)
    given = dict(query)
    path, revision = (match["path"], match["revision"]) if match else (None, None)
    wrong_query = len(given) < len(query) or set(given) - {"split", "config"} or not all(given.values())
    if match is None or wrong_query or (given and (path or revision)) or (revision and not path):
        raise UserError(f"data.files: {text!r} is not allowed; allowed: {ALLOWED}")
    revision = urllib.parse.unquote(revision or ("main" if path else _CONVERTED))
    return HubName(
        text=text,
        repository=match["repository"],
        revision=_CONVERTED if revision == "~parquet" else revision,
        path=path,
        split=given.get("split"),
        config=given.get("config"),
    )


def path_files(name: HubName, path: str, listed: Sequence[str]) -> list[str]:
    """Return the files that a path names: one file, the data files below a directory, or those of a glob."""
    if path in listed:
        return [path]
    if any(character in path for character in "*["):
        pattern = _glob(path)
        files = [file for file in listed if pattern.fullmatch(file) and _is_data(file)]
    else:
        files = [file for file in listed if file.startswith(f"{path}/") and _is_data(file)]
    if not files:
        data = [file for file in listed if _is_data(file)]
        held = shown(data[:10]) + (f" and {len(data) - 10} more" if len(data) > 10 else "")
        raise UserError(f"data.files: {name.text!r} has no file; its repository holds: {held or 'no data'}")
    return files


def _is_data(file: str) -> bool:
    return file.lower().endswith(DATA_SUFFIXES) and not any(part.startswith(".") for part in file.split("/"))


def _glob(pattern: str) -> re.Pattern[str]:
    """Return a glob as a regular expression: `*` stays inside a directory, `**/` spans any number of them."""
    parts = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append("(?:[^/]+/)*")
        else:
            inside = re.sub(r"\*+", "*", part)
            # The translation of `*` is `.*`, and the text ends with `\Z`.
            segment = "".join(
                "[^/]*" if piece == "*" else fnmatch.translate(piece)[4:-3]
                for piece in re.findall(r"\*|\[[^\]]*\]|[^*\[]+|\[", inside)
            )
            parts.append(f"{segment}/")
    text = "".join(parts)
    return re.compile(text[:-1] if text.endswith("/") else f"{text}[^/]*")


def shown(names: Iterable[str]) -> str:
    """Return names of strangers for a message, without control characters."""
    return ", ".join(repr(name)[1:-1] for name in names)


def split_files(name: HubName, listed: Sequence[str]) -> list[str]:
    """Return the files of a split; the conversion names them CONFIG/SPLIT/NUMBER.parquet.

    A data set that was converted in part only has `partial-train`, which is another split than `train`.
    """
    splits: dict[tuple[str, str], list[str]] = {}
    for file in listed:
        parts = file.split("/")
        if len(parts) == 3 and file.endswith(".parquet"):
            splits.setdefault((parts[0], parts[1]), []).append(file)
    chosen = [
        key
        for key in splits
        if (name.config is None or key[0] == name.config) and (name.split is None or key[1] == name.split)
    ]
    if name.config is None and len(chosen) > 1 and len({config for config, _ in splits}) > 1:
        # Without config=, the configuration `default` is meant.
        chosen = [key for key in chosen if key[0] == "default"] or chosen
    if len(chosen) == 1:
        return splits[chosen[0]]
    several = len({config for config, _ in splits}) > 1
    queries = [f"?config={c}&split={s}" if several else f"?split={s}" for c, s in list(splits)[:20]]
    problem = "names several splits" if chosen else "names no split"
    allowed = shown(queries) or f"its files, hf://datasets/{name.repository}/PATH"
    raise UserError(f"data.files: {name.text!r} {problem} of the Parquet conversion; allowed: {allowed}")


def local_names(repository: str, files: Sequence[str]) -> list[str]:
    """Return the names under which files are kept: sources in reports are called by them.

    `default/train/0000.parquet` of `owner/chats-1.5` -> `chats-1_5-default-train-0000.parquet`.
    """
    names = []
    for file in files:
        text = f"{repository.split('/')[1]}-{file.replace('/', '-')}"
        match = _SUFFIXES.search(text.lower())
        end = match.start() if match else len(text)
        stem = "".join(c if c.isprintable() and c != "." else "_" for c in text[:end])
        if len(stem.encode()) > _MAX_NAME_BYTES:
            # 4 bytes per character at most.
            stem = f"{bytes_digest(file.encode())[:8]}-{stem[-_MAX_NAME_BYTES // 4 :]}"
        names.append(stem + text[end:])
    if len(set(names)) < len(names):
        names = [f"{bytes_digest(file.encode())[:8]}-{name}" for file, name in zip(files, names)]
    return names
