"""The versions and the code that made an output, and the rule by which they count when it is used again.

* A new major or minor version of a library that decides the outputs of a cheap stage makes them anew: it is
  part of the stage's key.
* Outputs that cost hours or days (the target, regenerated answers, a training and its checkpoints) are kept
  and resumed, with one remark that names both versions. So are those of cheap stages when only the patch
  level differs: patch releases correct errors and appear monthly, and what follows from an output is known by
  the digest of its contents in any case.
* Code of this project counts by the `version` of the stage. A training that resumes with other code is
  continued, with one remark that names the modules.

Libraries are named where a stage is declared (`@stage(libraries=..., is_costly=...)`) and, for trainings, in
`TRAINING_LIBRARIES`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.storage.code_digests import module_digests

TRAINING_LIBRARIES = ("torch", "transformers", "numpy", "safetensors")
TRAINING_CODE = ("dflash_core.training.rank",)
# Modules that a remark names; more are counted.
SHOWN_MODULES = 5


@functools.cache
def version_of(library: str) -> str:
    """Return the installed version of a library, `none` where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of some libraries."""
    return {name: version_of(name) for name in libraries}


def minor_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return major and minor version of some libraries: 2.9.1+cpu -> 2.9."""
    return {name: ".".join(version_of(name).split("+")[0].split(".")[:2]) for name in libraries}


def changed_versions(made_with: object) -> str:
    """Return `torch 2.8.0, now 2.9.1; ...` for recorded versions that are no longer installed, else ""."""
    recorded = made_with if isinstance(made_with, Mapping) else {}
    return "; ".join(
        f"{name} {version}, now {version_of(name)}"
        for name, version in recorded.items()
        if version != version_of(name)
    )


def training_provenance() -> dict[str, Any]:
    """Return what run.json records of the program: `made_with`, and `code`, a digest per module."""
    return {"made_with": versions(TRAINING_LIBRARIES), "code": module_digests(TRAINING_CODE)}


def changed_modules(recorded: object, now: Mapping[str, str]) -> str:
    """Return the modules whose code differs from what run.json recorded, in a few words, else ""."""
    # Runs of earlier versions recorded none.
    if not isinstance(recorded, Mapping):
        return ""
    names = sorted(name for name in {*recorded, *now} if recorded.get(name) != now.get(name))
    more = f" and {len(names) - SHOWN_MODULES} more" if len(names) > SHOWN_MODULES else ""
    return ", ".join(names[:SHOWN_MODULES]) + more


def resume_remarks(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line each for other versions and other code than those that wrote a run's run.json so far."""
    remarks = []
    if changed := changed_versions(earlier.get("made_with")):
        remarks.append(f"resumes with other versions than it was trained with so far: {changed}")
    if changed := changed_modules(earlier.get("code"), now["code"]):
        remarks.append(f"resumes with other code than it was trained with so far: {changed}")
    if remarks:
        remarks.append(
            'its result may differ from that of an undisturbed run; refresh=["train"] trains it anew'
        )
    return remarks
