"""Named runs: the parameter sets of `prefect.yaml`, and how they merge into a `RunConfig`.

A run's settings are, later ones winning key by key: the defaults of `dflash_core.config`, the parameters of
the deployment in `prefect.yaml`, what the user gives. So `{"training": {"epochs": 2}}` changes one key of the
named set. The command line and the flow bodies both resolve through here, with or without a Prefect server.
Imports no prefect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_core.batching.strategies import STRATEGIES
from dflash_core.config import RunConfig, StrategyName, from_dict
from dflash_core.errors import UserError

PREFECT_YAML = Path(__file__).resolve().parents[2] / "prefect.yaml"


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """What a flow takes beside the run's settings."""

    refresh: tuple[
        str, ...
    ] = ()  # stages to run again although nothing changed: ingest, profile, edges, plan, ...


@dataclass(frozen=True, kw_only=True)
class CompareOptions(FlowOptions):
    """compare-strategies: which strategies, with which seeds."""

    strategies: tuple[StrategyName, ...] = tuple(STRATEGIES)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise UserError(
                f"strategies: {list(self.strategies)!r} is not allowed; allowed: one or more, each once"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise UserError(
                f"seeds: {list(self.seeds)!r} is not allowed; allowed: one or more, each once, >= 0"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(FlowOptions):
    """evaluate-drafter: which drafter."""

    drafter_path: str | None = (
        None  # an exported drafter's directory or a run's; None: the deployment's latest run
    )


@dataclass(frozen=True, kw_only=True)
class ServeCheckOptions(EvaluateOptions):
    """serve-check: which drafter, and how the engine runs."""

    python: str = ".venv-serve/bin/python"  # of an environment with vLLM: make serve-env
    dtype: Literal["auto", "bfloat16", "float32"] = (
        "auto"  # of the engine; auto: bfloat16 where this CPU is fast at it
    )
    max_num_seqs: int = 16  # prompts that the engine decodes at once
    control: bool = True  # also serve the drafter with its layers one off, which has to be told apart

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UserError(f"max_num_seqs: {self.max_num_seqs!r} is not allowed; allowed: >= 1")


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(FlowOptions):
    """advise: what predictions rest on."""

    measure: bool = True  # run a few microbatches on this machine; false: shapes and an assumed speed


@dataclass(frozen=True, kw_only=True)
class PreviewOptions(FlowOptions):
    """preview-data: how much to show."""

    limit: int = 3  # samples

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 100:
            raise UserError(f"limit: {self.limit!r} is not allowed; allowed: 1 to 100")


@dataclass(frozen=True, kw_only=True)
class PruneOptions(FlowOptions):
    """prune: list, or remove."""

    remove: bool = False  # false: only list what would go
    keep_runs: int | None = None  # also drop all but the newest runs of each deployment

    def __post_init__(self) -> None:
        if self.keep_runs is not None and self.keep_runs < 1:
            raise UserError(f"keep_runs: {self.keep_runs!r} is not allowed; allowed: >= 1 or null")


@dataclass(frozen=True)
class FlowInfo:
    """One flow: what it is for and the class of its options."""

    summary: str
    options: type[FlowOptions] = FlowOptions

    def option_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(self.options))


FLOWS = {
    "train-dflash": FlowInfo("data, length profile, bucket edges, batch plans, training, acceptance, report"),
    "rebucket": FlowInfo("ingest of new files, length profile, bucket edges and batch plans; nothing else"),
    "compare-strategies": FlowInfo(
        "train every batching strategy on the same samples and anchors", CompareOptions
    ),
    "evaluate-drafter": FlowInfo("real speculative decoding with a trained drafter", EvaluateOptions),
    "serve-check": FlowInfo("a trained drafter in vLLM against our evaluator", ServeCheckOptions),
    "advise": FlowInfo("what each batching strategy would cost on this data, before training", AdviseOptions),
    "preview-data": FlowInfo(
        "show samples as the drafter will see them: text, loss mask, anchors", PreviewOptions
    ),
    "prune": FlowInfo("list, then remove, stored outputs that no run refers to", PruneOptions),
}


def module_of(flow_name: str) -> str:
    """Module and function that hold a flow: `train-dflash` -> `flows.train_dflash`, function
    `train_dflash`.
    """
    return f"flows.{flow_name.replace('-', '_')}"


def deployments(flow_name: str, path: Path = PREFECT_YAML) -> dict[str, dict[str, Any]]:
    """The flow's deployments in `prefect.yaml`: name -> the deployment's mapping (description, parameters,
    ...).

    Raises:
        UserError: the file is missing or is not YAML.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; deployments are read from the project's prefect.yaml") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    entrypoint = f"{module_of(flow_name)}.{flow_name.replace('-', '_')}"
    entries = (document or {}).get("deployments") or []
    return {entry["name"]: entry for entry in entries if entry.get("entrypoint") == entrypoint}


def named_parameters(flow_name: str, name: str, path: Path = PREFECT_YAML) -> dict[str, Any]:
    """The parameter set of deployment `name`.

    Raises:
        UserError: no deployment of that name; lists those that exist.
    """
    known = deployments(flow_name, path)
    if name not in known:
        raise UserError(
            f"{flow_name}: no deployment {name!r} in {path.name}; there are: {', '.join(known) or 'none'}"
        )
    return known[name].get("parameters") or {}


def merge(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`base` with `given` over it, mappings key by key, all else replaced whole. Neither argument is changed.

    merge({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}) == {"a": {"x": 1, "y": 3}}
    """
    merged = dict(base)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def data_name(files: Sequence[str]) -> str:
    """A word for the data in names of runs: `chats` for `data/chats/*.jsonl`, `chats-and-2-more` for three names,
    `stdlib` for none.
    """
    if not files:
        return "stdlib"
    path = Path(files[0])
    while any(character in path.name for character in "*?["):
        path = path.parent
    name = path.name.split(".")[0] or "data"
    return name if len(files) == 1 else f"{name}-and-{len(files) - 1}-more"


def _sections(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drops sections that were left out (None) and reads `data: [files]` as `data: {files: [files]}`."""
    kept = {name: value for name, value in parameters.items() if value is not None}
    if isinstance(kept.get("data"), list | tuple):
        kept["data"] = {"files": list(kept["data"])}
    return kept


def resolve(
    flow_name: str, deployment: str | None, given: dict[str, Any], path: Path = PREFECT_YAML
) -> tuple[RunConfig, FlowOptions]:
    """The settings of a run of `flow_name` and the flow's own options.

    Args:
        deployment: a name in `prefect.yaml`; None: defaults and `given` alone.
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
            raise UserError(
                f"{name}: unknown parameter of {flow_name}; allowed: {', '.join(sorted(allowed))}"
            )
    options = {name: values.pop(name) for name in info.option_names() if name in values}
    if deployment:
        values.setdefault("deployment", deployment)
    return from_dict(RunConfig, values), from_dict(info.options, options)
