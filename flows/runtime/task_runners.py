"""Task runners for the tasks of files and epochs: threads of the flow's process, or a Dask or Ray cluster.

Results do not depend on the choice. A cluster needs the extra `dask` or `ray`, and machines that see the
storage root and the data under the same paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from prefect.context import FlowRunContext

from dflash_core.config import RunConfig
from dflash_core.errors import UserError

# Workers of a Dask cluster on this machine, made for one flow run.
LOCAL_WORKERS = 2


@contextlib.contextmanager
def task_runner(config: RunConfig) -> Iterator[None]:
    """Use the runner of the settings for every task that the body submits.

    Raises:
        UserError: the package of the runner is not installed.
    """
    if config.task_runner == "threads":
        yield
        return
    try:
        runner = _dask(config) if config.task_runner == "dask" else _ray(config)
    except ImportError as error:
        raise UserError(
            f"task_runner: {config.task_runner!r} needs a package that is not installed ({error.name}); "
            f"allowed: pip install 'train-dflash[{config.task_runner}]', or threads"
        ) from error
    context = FlowRunContext.get()
    assert context is not None, "only within a flow run"
    with runner, context.model_copy(update={"task_runner": runner}):
        yield


def _dask(config: RunConfig) -> Any:
    from prefect_dask import DaskTaskRunner

    if config.task_runner_address is not None:
        return DaskTaskRunner(address=config.task_runner_address)
    cluster = {"n_workers": LOCAL_WORKERS, "threads_per_worker": 1, "dashboard_address": None}
    return DaskTaskRunner(cluster_kwargs=cluster)


def _ray(config: RunConfig) -> Any:
    from prefect_ray import RayTaskRunner

    return RayTaskRunner(address=config.task_runner_address)
