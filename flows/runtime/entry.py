"""Decorator that makes a Prefect flow of a function that takes a `RunConfig` and its flow's options.

The flow's parameters are the sections of `RunConfig`, each a partial mapping, followed by the options. Their
types are derived from the dataclasses, so Prefect's schema check and its forms know every field. Everything
else is checked when the settings are resolved, with one message that names the field. A process resolves the
settings of a flow run once: the command line before it imports prefect (`run_resolved` hands the objects
over), a worker's child process when Prefect needs the name of the run.
"""

import contextvars
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from dflash_core.redaction import redact_log_records, redacted_exceptions
from flows.runtime import deployments
from flows.runtime.crashed_runs import process_note
from flows.runtime.deployments import FlowOptions
from flows.runtime.run_requests import check_request
from flows.runtime.task_runners import task_runner
from tasks.reporting.mlflow_client import adopt_artifacts
from tasks.reporting.mlflow_run import close_runs_of_flow
from tasks.storage.input_files import check_files, data_name
from tasks.storage.live_runs import live_note

Settings = tuple[RunConfig, FlowOptions]
_resolved: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("resolved_settings", default=None)


def _plain(hint: Any) -> Any:
    """Return a field's type as Prefect's schema can show it: tuples as lists."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return list[_plain(args[0])]  # type: ignore[misc]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, [_plain(a) for a in args])
    return hint


def parameter_type(section: type) -> Any:
    """Return a TypedDict of a settings class: every key may be missing, no other key is allowed."""
    hints = typing.get_type_hints(section)
    annotations = {}
    for f in dataclasses.fields(section):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
        annotations[f.name] = Annotated[_plain(hints[f.name]), Field(description=f"default: {default!r}")]
    name = section.__name__.replace("Config", "Settings")
    mapping = TypedDict(name, annotations, total=False)  # type: ignore[operator]
    mapping.__pydantic_config__ = ConfigDict(extra="forbid")
    return mapping


def _signature(options: type[FlowOptions]) -> inspect.Signature:
    parameters = []
    hints = typing.get_type_hints(RunConfig)
    for f in dataclasses.fields(RunConfig):
        annotation: Any = hints[f.name]
        if dataclasses.is_dataclass(annotation):
            annotation = parameter_type(typing.cast(type, annotation))
            if f.name == "data":
                annotation = annotation | list[str]
        parameters.append(_parameter(f.name, annotation | None))
    option_hints = typing.get_type_hints(options)
    own = [_parameter(f.name, _plain(option_hints[f.name]) | None) for f in dataclasses.fields(options)]
    return inspect.Signature([*parameters, *own])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def run_flow(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Make `function(config: RunConfig, options)` the Prefect flow `name`, whose parameters are the sections.

    When the run belongs to a deployment of `prefect.yaml`, the given parameters are merged over that
    deployment's set, so `prefect deployment run ... --param 'training={"epochs": 2}'` changes one key, as on
    the command line. What such a run may ask for is limited, see `flows.runtime.run_requests`.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        info = deployments.FLOWS[name]

        @functools.wraps(function)
        def entry(*args: Any, **given: Any) -> Any:
            redact_log_records()
            del args, given  # Prefect also holds them as the parameters of the run
            flow_run_id = str(runtime.flow_run.id)
            config, options = _settings(name, flow_run_id)
            check_files(config)
            adopt_artifacts(config)
            root = Path(config.storage_root).expanduser().resolve()
            notes = (process_note(flow_run_id), live_note(root, flow_run_id, name))
            with redacted_exceptions(), notes[0], notes[1], task_runner(config):
                return function(config, options)

        signature = _signature(info.options)
        entry.__signature__ = signature  # type: ignore[attr-defined]
        entry.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return flow(
            name=name,
            description=info.summary,
            flow_run_name=functools.partial(_flow_run_name, name),
            task_runner=ThreadPoolTaskRunner(max_workers=4),
            validate_parameters=False,
            on_failure=[close_runs_of_flow],
            on_cancellation=[close_runs_of_flow],
            on_crashed=[close_runs_of_flow],
        )(entry)

    return decorate


def run_resolved(flow: Any, config: RunConfig, options: FlowOptions) -> Any:
    """Run a flow of `run_flow` with resolved settings; Prefect records all of them as parameters."""
    token = _resolved.set((config, options))
    try:
        return flow(**deployments.to_parameters(config, options))
    finally:
        _resolved.reset(token)


@functools.lru_cache(maxsize=1)
def _settings(name: str, flow_run_id: str) -> Settings:
    """Return the settings of the current run; its name and its body both need them."""
    del flow_run_id  # the key of the cache
    resolved = _resolved.get()
    if resolved is not None:
        return resolved
    given, deployment = runtime.flow_run.parameters, runtime.deployment.name
    if deployment and not given.get("deployment"):
        given = {**given, "deployment": deployment}
    known = deployment if deployment in deployments.deployments(name) else None
    settings = deployments.resolve(name, known, given)
    # Without a deployment, the flow is called as a function in this process.
    if runtime.deployment.id:
        check_request(name, known, settings)
    return settings


def _flow_run_name(name: str) -> str:
    """Return deployment, strategy and data of the run as its name: `quickstart-packed-stdlib`."""
    try:
        config, options = _settings(name, str(runtime.flow_run.id))
    except UserError:  # reported when the flow starts
        given = runtime.flow_run.parameters
        return str(given.get("deployment") or runtime.deployment.name or "default")
    compared = getattr(options, "strategies", None)
    strategy = f"{len(compared)}-strategies" if compared else config.batching.strategy
    return f"{config.deployment}-{strategy}-{data_name(config.data.files)}"
