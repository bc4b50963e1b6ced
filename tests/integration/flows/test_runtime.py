"""Flows in a process: settings and records of a run, crashed runs, task runners, with a temporary server."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.flow_runs import write_rows
from dflash_core.errors import UserError


@pytest.fixture
def resolutions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the flows whose settings were resolved during a test, in order."""
    from flows.runtime import deployments

    names: list[str] = []
    resolve = deployments.resolve

    def recorded(flow_name: str, *arguments: Any) -> Any:
        names.append(flow_name)
        return resolve(flow_name, *arguments)

    monkeypatch.setattr(deployments, "resolve", recorded)
    return names


def newest_flow_run() -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        [flow_run] = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    return flow_run


def test_the_command_line_resolves_settings_once_and_prefect_records_all(
    settings: dict, resolutions: list[str]
) -> None:
    from flows.prune import prune
    from flows.runtime import deployments
    from flows.runtime.entry import run_resolved

    config, options = deployments.resolve("prune", None, settings | {"keep_runs": 2})
    run_resolved(prune, config, options)
    assert resolutions == ["prune"]
    flow_run = newest_flow_run()
    assert flow_run.parameters == deployments.to_parameters(config, options)
    assert flow_run.parameters["batching"]["token_budget"] == 512
    assert flow_run.parameters["optimizer"]["lr"] == config.optimizer.lr
    assert flow_run.parameters["keep_runs"] == 2
    assert flow_run.name == "default-packed-data"


def test_a_flow_run_resolves_its_settings_once(settings: dict, resolutions: list[str]) -> None:
    from flows.prune import prune

    prune(**settings)
    assert resolutions == ["prune"]
    other = settings | {"batching": {**settings["batching"], "strategy": "random"}}
    prune(**other)
    assert resolutions == ["prune", "prune"]
    assert newest_flow_run().name == "default-random-data"


def test_flow_runs_without_a_process_are_marked_as_crashed(
    prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    from flows.runtime import crashed_runs

    monkeypatch.setattr(crashed_runs, "_notes", lambda: tmp_path)
    empty_flow = flow(lambda: None, name="empty")
    with get_client(sync_client=True) as client:
        crashed, alive = (client.create_flow_run(empty_flow, state=Running()) for _ in range(2))
        with crashed_runs.process_note(str(crashed.id)), crashed_runs.process_note(str(alive.id)):
            note = tmp_path / f"{crashed.id}.json"
            note.write_text(json.dumps(json.loads(note.read_text()) | {"started": 0.0}))
            assert crashed_runs.close_crashed_runs() == [crashed.name]
            assert crashed_runs.close_crashed_runs() == []
        states = [client.read_flow_run(run.id).state.type.value for run in (crashed, alive)]
    assert states == ["CRASHED", "RUNNING"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ingest_on_a_dask_cluster_writes_the_same_bytes(settings: dict) -> None:
    """Compare two worker processes with threads: every file of every shard and every plan is byte-equal."""
    pytest.importorskip("prefect_dask", reason="the extra `dask` is not installed")
    from flows.rebucket import rebucket

    root = Path(settings["storage_root"])
    for seed in (1, 2, 3):
        write_rows(Path(settings["data"]["files"][0]) / f"more-{seed}.jsonl", 20, seed=seed)

    def written() -> dict[str, bytes]:
        paths = [path for stage in ("ingest", "plan") for path in (root / "store" / stage).rglob("*")]
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.is_file()}

    rebucket(**settings)
    expected = written()
    assert sum(name.endswith("tokens.bin") for name in expected) == 4
    shutil.rmtree(root / "store")
    rebucket(**{**settings, "task_runner": "dask"})
    assert written() == expected


def test_a_missing_task_runner_is_one_message(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.rebucket import rebucket

    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    with pytest.raises(UserError, match=r"task_runner: 'ray' needs a package.*train-dflash\[ray\]"):
        rebucket(**{**settings, "task_runner": "ray"})
