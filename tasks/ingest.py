"""Stage `ingest`, one task a file: conversations become a token shard. Also the list of files and the open
data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig, RunConfig, decisive
from dflash_core.data import stdlib_corpus
from tasks.storage.input_files import find_files
from tasks.storage.stages import RETRY_IO, FileDigests, stage


@dataclass(frozen=True)
class Source:
    """One file to ingest, or the standard library; `digest` is of its contents."""

    path: str
    digest: str

    @property
    def name(self) -> str:
        return Path(self.path).name


def find_sources(data: DataConfig, digests: FileDigests) -> list[Source]:
    """What is to be ingested, with the digest of each; the standard library when no file is named."""
    if not data.files:
        return [Source(stdlib_corpus.SOURCE, stdlib_corpus.corpus_digest())]
    return [Source(str(path), digests.of(path)) for path in find_files(data.files)]


def ingest_rules(config: RunConfig, digests: FileDigests) -> dict[str, Any]:
    """The settings that decide a shard, beside the file and the tokenizer."""
    rules = decisive(config.data)
    for name in ("files", "min_validation_samples"):  # these decide the set of shards, and its split
        del rules[name]
    if config.data.chat_template is not None:
        rules["chat_template"] = digests.of(Path(config.data.chat_template))
    return {**rules, "mask_token_id": config.drafter.mask_token_id}


@stage(
    "ingest",
    version=3,
    sources=("dflash_core.data.ingest", "dflash_core.anchors"),
    locations=("path", "data", "target_directory", "trust_remote_code"),
    **RETRY_IO,
)
def ingest(
    out: Path,
    *,
    source_digest: str,
    source_name: str,
    tokenizer_fingerprint: str,
    rules: dict[str, Any],
    path: str,
    data: dict[str, Any],
    target_directory: str,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Writes the shard into `out/shard`."""
    from dflash_core.config import from_dict
    from dflash_core.data.chat import load_tokenizer
    from dflash_core.data.ingest import ingest_file

    del source_digest, source_name, tokenizer_fingerprint  # the key; a file's name is the name of its source
    manifest = ingest_file(
        path,
        from_dict(DataConfig, data),
        load_tokenizer(target_directory, trust_remote_code=trust_remote_code),
        out / "shard",
        mask_token_id=rules["mask_token_id"],
    )
    shown = (
        "digest", "num_rows", "num_blank", "num_samples", "num_rejected", "num_duplicates", "num_tokens", "rejects",
        "notes",
    )  # fmt: skip
    format_name = manifest["meta"]["format"]
    return {"source": Path(path).name, "format": format_name, **{name: manifest[name] for name in shown}}
