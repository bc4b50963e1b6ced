"""Named runs: the parameter sets of `prefect.yaml`, and how they merge into a `RunConfig`.

The file is `prefect.yaml` in the working directory if it deploys flows of this project, and otherwise the one
that comes with the package. Three layers are merged key by key, later ones over earlier ones: the defaults of
`dflash_core.config`, the parameters of the deployment in `prefect.yaml`, and what the user gives. So
`{"training": {"epochs": 2}}` changes one key of the named set. The command line and the flows both resolve
settings here, with or without a Prefect server. This module does not import prefect.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import RunConfig, StrategyName, from_dict, request_field, to_dict
from dflash_core.errors import UserError

# In a checkout a link to the file at its root, in an installed package a copy of it.
PACKAGED_YAML = Path(__file__).resolve().parents[1] / "prefect.yaml"


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """The parameters of a flow that are not settings of a run."""

    # Stages to run again although nothing changed: ingest, profile, edges, plan, ...
    refresh: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareOptions(FlowOptions):
    """compare-strategies: which strategies, with which seeds."""

    strategies: tuple[StrategyName, ...] = tuple(STRATEGIES)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        strategies, seeds = list(self.strategies), list(self.seeds)
        if not strategies or len(set(strategies)) != len(strategies):
            raise UserError(f"strategies: {strategies!r} is not allowed; allowed: one or more, each once")
        if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
            raise UserError(f"seeds: {seeds!r} is not allowed; allowed: one or more, each once, >= 0")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FlowOptions):
    """evaluate-drafter: which drafter."""

    # Directory of an exported drafter or of a run; None: the deployment's latest run.
    drafter_path: str | None = request_field(None, "read")


@dataclass(frozen=True, kw_only=True)
class CompareDraftersOptions(FlowOptions):
    """compare-drafters: which drafters."""

    # Directories of exported drafters or of runs; a single one is compared with the deployment's latest run.
    drafter_paths: tuple[str, ...] = request_field((), "read")


@dataclass(frozen=True, kw_only=True)
class ServeCheckOptions(EvaluateOptions):
    """serve-check: which drafter, and how the engine runs."""

    # Python of an environment with vLLM: `make serve-env` creates it.
    python: str = request_field(".venv-serve/bin/python", "own")
    # Compute dtype of the engine; auto: bfloat16 where this CPU is fast at it.
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # Prompts that the engine decodes at once.
    max_num_seqs: int = 16
    # Also serve the drafter with layer ids that are one off; the check has to notice that.
    control: bool = True

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UserError(f"max_num_seqs: {self.max_num_seqs!r} is not allowed; allowed: >= 1")


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(FlowOptions):
    """advise: the basis of the predictions."""

    # True: run a few microbatches on this machine; False: derive the costs from shapes and an assumed speed.
    measure: bool = True


@dataclass(frozen=True, kw_only=True)
class PreviewOptions(FlowOptions):
    """preview-data: how many samples to show."""

    limit: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 100:
            raise UserError(f"limit: {self.limit!r} is not allowed; allowed: 1 to 100")


@dataclass(frozen=True, kw_only=True)
class PruneOptions(FlowOptions):
    """prune: list, or remove."""

    # False: only list what would be removed.
    remove: bool = False
    # Also remove all but this many of the newest runs of each deployment.
    keep_runs: int | None = None

    def __post_init__(self) -> None:
        if self.keep_runs is not None and self.keep_runs < 1:
            raise UserError(f"keep_runs: {self.keep_runs!r} is not allowed; allowed: >= 1 or null")


@dataclass(frozen=True)
class FlowInfo:
    """Summary of a flow, and the class of its options."""

    summary: str
    options: type[FlowOptions] = FlowOptions

    def option_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(self.options))


FLOWS = {
    "train-dflash": FlowInfo("data, length profile, bucket edges, batch plans, training, acceptance, report"),
    "rebucket": FlowInfo("ingest of new files, length profile, bucket edges and batch plans; nothing else"),
    "compare-strategies": FlowInfo("train every strategy on the same samples and anchors", CompareOptions),
    "evaluate-drafter": FlowInfo("real speculative decoding with a trained drafter", EvaluateOptions),
    "compare-drafters": FlowInfo(
        "two or more drafters on the same prompts, with paired differences", CompareDraftersOptions
    ),
    "serve-check": FlowInfo("a trained drafter in vLLM, compared with our evaluator", ServeCheckOptions),
    "advise": FlowInfo("predict the cost of each batching strategy on this data", AdviseOptions),
    "preview-data": FlowInfo("show samples as the drafter sees them: text, mask, anchors", PreviewOptions),
    "prune": FlowInfo("list stored outputs that nothing refers to; remove them on request", PruneOptions),
}


def function_of(flow_name: str) -> str:
    """Return the name of a flow's function: `train-dflash` -> `train_dflash`."""
    return flow_name.replace("-", "_")


def module_of(flow_name: str) -> str:
    """Return the name of a flow's module: `train-dflash` -> `flows.train_dflash`."""
    return f"flows.{function_of(flow_name)}"


def entrypoint_of(flow_name: str) -> str:
    """Return a flow's entrypoint in `prefect.yaml`: `train-dflash` -> `flows.train_dflash.train_dflash`."""
    return f"{module_of(flow_name)}.{function_of(flow_name)}"


@functools.lru_cache(maxsize=2)
def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the deployments of a file; it is parsed once per process."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    entries = (document.get("deployments") if isinstance(document, dict) else None) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: deployments: not allowed; allowed: a list of mappings")
    return entries


def prefect_yaml() -> Path:
    """Return the file of the named runs: the user's in the working directory, or the packaged one.

    Raises:
        UserError: the user's file cannot be read or is not YAML.
    """
    own = Path.cwd() / "prefect.yaml"
    entrypoints = {entrypoint_of(flow_name) for flow_name in FLOWS}
    if own.is_file() and any(entry.get("entrypoint") in entrypoints for entry in _entries(own)):
        return own
    return PACKAGED_YAML


def deployments(flow_name: str, path: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the flow's deployments: name -> mapping with description, parameters and more.

    Args:
        path: None: the file that `prefect_yaml` chooses.

    Raises:
        UserError: the file cannot be read or is not YAML, or a deployment has no name.
    """
    path = path or prefect_yaml()
    named = {}
    for number, entry in enumerate(_entries(path), 1):
        if entry.get("entrypoint") == entrypoint_of(flow_name):
            name = entry.get("name")
            if not isinstance(name, str):
                raise UserError(
                    f"{path}: deployment {number}: name: {name!r} is not allowed; allowed: a string"
                )
            named[name] = entry
    return named


def named_parameters(flow_name: str, name: str, path: Path | None = None) -> dict[str, Any]:
    """Return the parameter set of deployment `name`.

    Raises:
        UserError: no deployment has that name, and the message lists those that exist; or its parameters are
            not a mapping.
    """
    path = path or prefect_yaml()
    known = deployments(flow_name, path)
    if name not in known:
        names = ", ".join(known) or "none"
        raise UserError(f"{flow_name}: no deployment {name!r} in {path}; there are: {names}")
    parameters = known[name].get("parameters") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{path}: {name}: parameters: {parameters!r} is not allowed; allowed: a mapping")
    return parameters


def merge(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `given`: mappings key by key, other values as a whole.

    merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}}
    """
    merged = dict(base)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _sections(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop sections that were left out (None) and read `data: [files]` as `data: {files: [files]}`."""
    sections = {name: value for name, value in parameters.items() if value is not None}
    if isinstance(sections.get("data"), list | tuple):
        sections["data"] = {"files": list(sections["data"])}
    return sections


def resolve(
    flow_name: str, deployment: str | None, given: dict[str, Any], path: Path | None = None
) -> tuple[RunConfig, FlowOptions]:
    """Return the settings of a run of `flow_name`, and the flow's options.

    Args:
        deployment: a name in `prefect.yaml`; None: only the defaults and `given`.
        given: sections of `RunConfig` (partial), options of the flow.

    Raises:
        UserError: an unknown deployment or parameter, a wrong type, a value out of range.
    """
    named = named_parameters(flow_name, deployment, path) if deployment else {}
    values = merge(_sections(named), _sections(given))
    info = FLOWS[flow_name]
    allowed = {f.name for f in dataclasses.fields(RunConfig)} | set(info.option_names())
    for name in values:
        if name not in allowed:
            names = ", ".join(sorted(allowed))
            raise UserError(f"{name}: unknown parameter of {flow_name}; allowed: {names}")
    options = {name: values.pop(name) for name in info.option_names() if name in values}
    if deployment:
        values.setdefault("deployment", deployment)
    return from_dict(RunConfig, values), from_dict(info.options, options)


def to_parameters(config: RunConfig, options: FlowOptions) -> dict[str, Any]:
    """Return every setting and option of a run as the flow's parameters, in JSON types."""
    return {**to_dict(config), **to_dict(options)}
