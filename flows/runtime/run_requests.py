"""Limits of what a run request that comes through a server may ask for.

Whoever starts a flow on this machine's command line is trusted: he can run anything anyway. Parameters that
arrive through a Prefect server are not: settings that name code, servers or files (those with a
`dflash_core.config.RequestRule`) are compared with the deployment's own in this machine's prefect.yaml. The
environment variable DFLASH_ALLOWED of the worker lists what else is allowed, separated by spaces and quoted
as in a shell: directories, whose contents may be named, and values.

    DFLASH_ALLOWED="/data http://127.0.0.1:5000" make worker
"""

from __future__ import annotations

import dataclasses
import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.config import RunConfig
from dflash_core.data.hub_names import is_hub_name
from dflash_core.data.packaged_files import packaged_path
from dflash_core.errors import UserError
from flows.runtime import deployments
from flows.runtime.deployments import FlowOptions

VARIABLE = "DFLASH_ALLOWED"


def walk(settings: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield every setting of a settings object as dotted name, field and value."""
    for field in dataclasses.fields(settings):
        name, value = f"{prefix}{field.name}", getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{name}.")
        else:
            yield name, field, value


def check_request(
    flow_name: str,
    deployment: str | None,
    settings: tuple[RunConfig, FlowOptions],
    path: Path | None = None,
) -> None:
    """Check the settings of a run request against those of its deployment on this machine.

    Args:
        deployment: a name in `prefect.yaml`; None: the request is for a deployment that this machine does not
            know, so only the defaults are its own.
        settings: the resolved settings of the request.
        path: of the named runs; None: the file that `deployments.prefect_yaml` chooses.

    Raises:
        UserError: a setting that the request may not choose, with the value and how to allow it.
    """
    path = path or deployments.prefect_yaml()
    # An installed package is no project: there it is the working directory.
    project = Path.cwd() if path == deployments.PACKAGED_YAML else path.parent
    own = deployments.resolve(flow_name, deployment, {}, path)
    own_values = {name: value for part in own for name, _, value in walk(part)}
    limits = _Limits(own=own[0], requested=settings[0], project=project)
    for part in settings:
        for name, field, value in walk(part):
            rule, own_value = field.metadata.get("request"), own_values[name]
            if rule is None or value == field.default or value == own_value and rule != "trust":
                continue
            for item in value if isinstance(value, tuple) else (value,):
                is_own = isinstance(own_value, tuple) and item in own_value
                if not is_own and (allowed := limits.refuse(name, rule, item)) is not None:
                    raise UserError(_message(flow_name, deployment, name, item, allowed))


def _message(flow_name: str, deployment: str | None, name: str, value: Any, allowed: str) -> str:
    command = f"python -m {deployments.module_of(flow_name)} {deployment or 'NAME'} --param {name}=..."
    return (
        f"{name}: {value!r} is not allowed in a run request through a server; allowed: {allowed}; otherwise "
        f"write it into the deployment's parameters in prefect.yaml, or run on this machine: {command}"
    )


class _Limits:
    """What a request may name, given the deployment's own settings and the directory of prefect.yaml."""

    def __init__(self, *, own: RunConfig, requested: RunConfig, project: Path) -> None:
        models = [(config.target.name, config.target.revision) for config in (own, requested)]
        self._may_trust = own.target.trust_remote_code and models[0] == models[1]
        try:
            self._listed = shlex.split(os.environ.get(VARIABLE, ""))
        except ValueError as error:
            raise UserError(f"{VARIABLE}: {error}; allowed: entries separated by spaces") from error
        self._written = [own.storage_root, *self._listed]
        self._read = [str(project), *self._written]

    def refuse(self, name: str, rule: str, value: Any) -> str | None:
        """Return None for a value that is allowed, else what is allowed instead."""
        if rule == "trust":
            only = "true only where prefect.yaml says so, for the target that it names"
            return None if self._may_trust else only
        if rule == "own":
            return None if value in self._listed else f"the deployment's own value, and values in {VARIABLE}"
        if name == "data.files":
            is_free = is_hub_name(value) or packaged_path(value) is not None
        else:
            is_free = rule == "model" and not _is_local(value)
        directories = self._written if rule == "write" else self._read
        if is_free or is_inside(value, directories):
            return None
        places = dict.fromkeys(os.path.realpath(os.path.expanduser(place)) for place in directories)
        return f"paths in {', '.join(places)}, and in directories listed in {VARIABLE}"


def _is_local(model: str) -> bool:
    """Return True for the name of a model that can only be, or is, a path."""
    return os.path.exists(model) or model.startswith((".", "/", "~")) or model.count("/") > 1


def is_inside(value: str, directories: list[str]) -> bool:
    """Return True for a path or glob within one of the directories, once all links are followed."""
    value = os.path.expanduser(value)
    try:
        if not os.path.lexists(value):
            value, rest = _split_glob(value)
            if ".." in Path(rest).parts:
                return False
        path = Path(os.path.realpath(value))
    # A null byte.
    except ValueError:
        return False
    return any(path.is_relative_to(os.path.realpath(os.path.expanduser(place))) for place in directories)


def _split_glob(value: str) -> tuple[str, str]:
    """Split a path before its first part with a wildcard: `a/b/*.json` -> `a/b`, `*.json`."""
    parts = Path(value).parts
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.path.join("", *parts[:first]) or ".", os.path.join("", *parts[first:])
