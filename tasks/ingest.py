"""Stage `ingest`, one task per file: conversations become a token shard.

A shard depends on the bytes of its file, the tokenizer and the settings that `ingest_rules` returns, and on
nothing else: a new file is ingested alone, and a file that was moved is not read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, RunConfig, decisive
from dflash_core.data import stdlib_corpus
from tasks.storage.file_digests import FileDigests
from tasks.storage.input_files import fetch_files
from tasks.storage.stages import RETRY_IO, stage

# Figures of a shard's manifest that its pointer repeats.
SHARD_FIGURES = (
    "digest",
    "num_rows",
    "num_blank",
    "num_samples",
    "num_rejected",
    "num_over_length",
    "num_over_length_tokens",
    "num_duplicates",
    "num_tokens",
    "rejects",
    "notes",
)


@dataclass(frozen=True)
class Source:
    """One file to ingest, or the standard library, with the digest of its contents."""

    path: str
    digest: str

    @property
    def name(self) -> str:
        return Path(self.path).name


def find_sources(
    data: DataConfig, digests: FileDigests, say: Callable[[str], object] = print
) -> list[Source]:
    """Return the files to ingest, downloaded where they are on the Hub; the standard library without any.

    The digest of a download is that of its bytes, like any file's: a new commit that leaves a file
    unchanged does not ingest it again.
    """
    if not data.files:
        return [Source(stdlib_corpus.SOURCE, stdlib_corpus.corpus_digest())]
    return [
        Source(str(path), digests.of(path))
        for path in fetch_files(data.files, digests.storage_root, say, limit_gb=data.download_limit_gb)
    ]


def ingest_rules(config: RunConfig, digests: FileDigests) -> dict[str, Any]:
    """Return the settings that decide a shard, together with the file and the tokenizer."""
    rules = decisive(config.data)
    # These decide the set of shards and its split, not a shard.
    for name in ("files", "min_validation_samples"):
        del rules[name]
    if config.data.chat_template is not None:
        rules["chat_template"] = digests.of(Path(config.data.chat_template))
    return {**rules, "mask_token_id": config.drafter.mask_token_id}


@stage(
    "ingest",
    version=5,
    sources=("dflash_core.data.ingest", "dflash_core.anchors"),
    key_only=("source_name", "tokenizer_fingerprint"),
    locations=("path", "data", "target_directory", "trust_remote_code"),
    # Templates are rendered by jinja2. What numpy and pyarrow write is a matter of this project's formats.
    libraries=("transformers", "tokenizers", "jinja2"),
    **RETRY_IO,
)
def ingest(
    out: Path,
    *,
    source_digest: str,
    rules: dict[str, Any],
    path: str,
    data: dict[str, Any],
    target_directory: str,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Write the shard into `out/shard`; fail if the file's bytes are not those of `source_digest`."""
    from dflash_core.config import from_dict
    from dflash_core.data.chat import load_tokenizer
    from dflash_core.data.ingest import ingest_file

    manifest = ingest_file(
        path,
        from_dict(DataConfig, data),
        load_tokenizer(target_directory, trust_remote_code=trust_remote_code),
        out / "shard",
        mask_token_id=rules["mask_token_id"],
        digest=source_digest,
    )
    figures = {name: manifest[name] for name in SHARD_FIGURES}
    return {"source": Path(path).name, "format": manifest["meta"]["format"], **figures}
