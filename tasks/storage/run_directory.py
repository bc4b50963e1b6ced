"""Run directories: `<storage_root>/<deployment>/<run key>/`, what decides a run, and the link to the latest
one.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig, decisive, to_dict
from dflash_core.drafter.directory import WEIGHTS_FILE, drafter_directory
from dflash_core.files import content_digest, write_json
from tasks.storage.stages import FileDigests

KEY_CHARACTERS = 12
SECTIONS = {
    f.name: type(getattr(RunConfig(), f.name)) for f in fields(RunConfig) if f.default_factory is not MISSING
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: its directory, and the fields its key is the digest of."""

    directory: Path
    key: str
    fields: dict[str, Any]

    @property
    def is_finished(self) -> bool:
        """Trained to its last step, with its drafter exported and its metrics recorded."""
        return all(
            (self.directory / name).is_file() for name in ("finished.json", "drafter/model.safetensors")
        )


def decisive_fields(
    config: RunConfig, *, dataset_digest: str, plan_digests: list[str], target_fingerprint: str
) -> dict[str, Any]:
    """Everything that decides the result of a training, flat: what the run key is made of.

    Data and batching settings enter through what they made, the shards and the plans: another number of
        buckets is
    another run only where the strategy uses buckets.
    """
    settings = decisive(config)
    fields: dict[str, Any] = {
        "data": dataset_digest,
        "plans": plan_digests,
        "target": target_fingerprint,
        "target.feature_dtype": config.target.feature_dtype,
        "batching.strategy": config.batching.strategy,
    }
    for section in ("drafter", "objective", "optimizer", "training"):
        fields |= {f"{section}.{name}": value for name, value in settings[section].items()}
    if config.training.init_from is not None:
        fields["training.init_from"] = _drafter_digest(Path(config.training.init_from))
    return fields


def _drafter_digest(path: Path) -> str:
    """Return the digest of the weights a run starts from: the same path may hold others later."""
    return FileDigests(path).of(drafter_directory(path, field="training.init_from") / WEIGHTS_FILE)


def find_run(config: RunConfig, fields: dict[str, Any]) -> Run:
    """The run that these fields name; its directory may not exist yet."""
    key = content_digest(fields)
    directory = Path(config.storage_root).resolve() / config.deployment / key[:KEY_CHARACTERS]
    return Run(directory=directory, key=key, fields=fields)


def prepare_directory(
    run: Run, config: RunConfig, paths: dict[str, Any], *, total_steps: int, mlflow_run_id: str
) -> None:
    """Writes run.json into the run's directory: the resolved config (execution settings may have changed),
    the inputs' paths, and what the key was made of.
    """
    earlier = read_run(run.directory)
    if earlier is not None and earlier.get("run_key") == run.key:
        described_config = keep_decisive(RunConfig, earlier["config"], to_dict(config))
    else:
        described_config = to_dict(config)
    described = {
        "config": described_config,
        "paths": paths,
        "run_key": run.key,
        "total_steps": total_steps,
        "mlflow_run_id": mlflow_run_id,
        "fields": run.fields,
    }
    write_json(run.directory / "run.json", described)


def keep_decisive(section: type, earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`now` with the deciding settings of `earlier`, for a run whose key is the same.

    Deciding settings outside the key have made the same shards and plans, whatever they say now: a file that
        was
    moved, a number of buckets that this strategy does not use. A checkpoint remembers what they were.
    """
    merged = dict(now)
    for f in fields(section):
        if section is RunConfig and f.name in SECTIONS:
            merged[f.name] = keep_decisive(SECTIONS[f.name], earlier.get(f.name, {}), now[f.name])
        elif not f.metadata.get("execution") and f.name in earlier:
            merged[f.name] = earlier[f.name]
    return merged


def latest_directory(config: RunConfig) -> Path:
    """The link to the deployment's latest run."""
    return Path(config.storage_root).resolve() / config.deployment / "latest"


def point_latest(directory: Path) -> str | None:
    """Makes `latest` beside a directory a relative link to it, by one rename; returns what it pointed to."""
    link = directory.parent / "latest"
    previous = os.readlink(link) if link.is_symlink() else None
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory.name)
    os.replace(temporary, link)
    return previous


def discard(run: Run, previous: str | None) -> None:
    """Removes a run that a mistake ended before its first checkpoint, and gives `latest` back to the run
    before.
    """
    if any((run.directory / "checkpoints").glob("step-*")):
        return
    shutil.rmtree(run.directory, ignore_errors=True)
    link = run.directory.parent / "latest"
    link.unlink(missing_ok=True)
    if previous is not None and (run.directory.parent / previous).is_dir():
        link.symlink_to(previous)


def read_run(directory: Path) -> dict[str, Any] | None:
    """run.json of a run's directory, or None."""
    try:
        return json.loads((directory / "run.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each field that decides a run and differs: name, old value, new value.

    differences({"training.seed": 0, "data": "a"}, {"training.seed": 1, "data": "a"}) == ["training.seed: 0 ->
    1"]
    """
    lines = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if a != b:
            lines.append(name if name in ("data", "plans", "target") else f"{name}: {a!r} -> {b!r}")
    return lines
