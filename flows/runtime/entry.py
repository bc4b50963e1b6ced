"""Makes a Prefect flow of a function that takes a `RunConfig` and its flow's options.

The flow's parameters are the sections of `RunConfig`, each a partial mapping, then the options; their types
are made from the dataclasses, so that Prefect's schema check and forms know every field. All other checking,
with one message that names the field, happens when the settings are resolved.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

from prefect import flow, runtime
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from dflash_core.config import RunConfig
from dflash_core.errors import UserError
from flows.runtime import deployments
from flows.runtime.crashed_runs import noted
from flows.runtime.deployments import FlowOptions
from flows.runtime.task_runners import task_runner
from tasks.reporting.mlflow_run import close_runs_of_flow
from tasks.storage.input_files import check_files


def _plain(hint: Any) -> Any:
    """A field's type as Prefect's schema can show it: tuples as lists."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return list[_plain(args[0])]  # type: ignore[misc]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, [_plain(a) for a in args])
    return hint


def parameter_type(section: type) -> Any:
    """A TypedDict of a settings class in which every key may be missing and no other key is allowed."""
    hints = typing.get_type_hints(section)
    annotations = {}
    for f in dataclasses.fields(section):
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
        annotations[f.name] = Annotated[_plain(hints[f.name]), Field(description=f"default: {default!r}")]
    made = TypedDict(section.__name__.replace("Config", "Settings"), annotations, total=False)  # type: ignore[operator]
    made.__pydantic_config__ = ConfigDict(extra="forbid")
    return made


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
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation
    )


def run_flow(name: str, **flow_options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `function(config: RunConfig, options)` becomes the Prefect flow `name` over the sections.

    When the run belongs to a deployment of `prefect.yaml`, that parameter set lies under what was given, so
    that `prefect deployment run ... --param 'training={"epochs": 2}'` changes one key, as on the command
    line.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        info = deployments.FLOWS[name]

        @functools.wraps(function)
        def entry(*args: Any, **given: Any) -> Any:
            config, options = _resolve(name, {**dict(zip(signature.parameters, args)), **given})
            check_files(config)
            with noted(str(runtime.flow_run.id)), task_runner(config):
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
            **flow_options,
        )(entry)

    return decorate


def _resolve(name: str, given: dict[str, Any]) -> tuple[RunConfig, FlowOptions]:
    deployment = runtime.deployment.name
    named = deployment if deployment in deployments.deployments(name) else None
    if deployment and not given.get("deployment"):
        given = {**given, "deployment": deployment}
    return deployments.resolve(name, named, given)


def _flow_run_name(name: str) -> str:
    """Runs say which deployment they are of, with which strategy and on which data: `quickstart-packed-stdlib`."""
    given = runtime.flow_run.parameters
    try:
        config, options = _resolve(name, given)
    except UserError:  # told when the flow starts
        return str(given.get("deployment") or runtime.deployment.name or "default")
    compared = getattr(options, "strategies", None)
    strategy = f"{len(compared)}-strategies" if compared else config.batching.strategy
    return f"{config.deployment}-{strategy}-{deployments.data_name(config.data.files)}"
