"""Stages that run again after a change, in one process against a temporary Prefect server.

Training and evaluation are replaced (`tests/support/stage_recorder.py`), so that a change costs a second;
`test_command.py` runs the real ones. Every change starts from the state that the one before it left.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.flow_runs import write_rows
from dflash_core.errors import UserError
from tests.support.stage_recorder import StageRecorder

# Five strategies, two epochs.
ALL_PLANS = ["plan"] * 10


def test_what_reruns_after_which_change(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sql
    from flows.runtime.deployments import merge
    from flows.train_dflash import train_dflash

    recorder = StageRecorder(monkeypatch)

    def ran(**changes: Any) -> list[str]:
        train_dflash(**merge(settings, changes))
        return recorder.take()

    cold = ["check-target", "edges", "evaluate", "ingest", *ALL_PLANS, "profile", "target", "train"]
    assert ran() == sorted(cold)
    assert ran() == []
    for path in (tmp_path / "data" / "a.jsonl", tmp_path / "target" / "config.json"):
        os.utime(path, ns=(1, 1))  # only the time
    assert ran() == []
    # Execution settings.
    assert ran(training={"max_draft_slots": 128, "log_every": 7, "checkpoint_every_steps": 3}) == []
    # The strategy is packed: the number of buckets changes only the edges and the plans of `bucketed`, for
    # the report.
    assert ran(batching={"num_buckets": 3}) == ["edges", "plan", "plan"]
    assert ran(evaluation={"num_prompts": 3}) == ["evaluate"]
    assert ran(optimizer={"lr": 0.002}) == ["evaluate", "train"]
    assert ran(drafter={"num_layers": 2}) == ["evaluate", "train"]
    assert ran(training={"seed": 1}) == sorted([*ALL_PLANS, "train", "evaluate"])
    assert ran(batching={"strategy": "bucketed"}) == ["evaluate", "train"]
    assert ran(batching={"strategy": "bucketed", "num_buckets": 3}) == ["evaluate", "train"]  # planned above
    budget = ran(batching={"token_budget": 600})
    assert budget == sorted(["edges", *ALL_PLANS, "train", "evaluate"])
    # Another SQL text with the same result: nothing after the profile runs.
    read = sql.read
    monkeypatch.setattr(sql, "read", lambda name: read(name) + "\nLIMIT 1000000000\n")
    assert ran() == ["profile"]
    monkeypatch.setattr(sql, "read", read)
    # Outputs of one stage deleted.
    root = Path(settings["storage_root"])
    [shard] = (root / "store" / "ingest").iterdir()
    (shard / "shard" / "tokens.bin").unlink()
    assert ran() == ["ingest"]
    # Another tokenizer: ingest of all files and what follows; lengths are equal, so profile, edges and plans
    # stay.
    path = tmp_path / "target" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("{", '{"a_note": "another tokenizer",', 1))
    assert ran() == ["check-target", "evaluate", "ingest", "target", "train"]
    # Other weights, the same tokenizer.
    weights = tmp_path / "target" / "generation_config.json"
    weights.write_text(weights.read_text().replace("{", '{"a_note": "another target",', 1))
    assert ran() == ["check-target", "evaluate", "target", "train"]
    # One more file: only that file is ingested.
    write_rows(tmp_path / "data" / "b.jsonl", 30, seed=1)
    assert ran() == sorted(["ingest", "profile", "edges", *ALL_PLANS, "train", "evaluate"])
    (tmp_path / "data" / "b.jsonl").unlink()
    assert ran() == []  # everything of the earlier data is still there
    assert ran(refresh=["profile"]) == ["profile"]
    # The storage root at another place: times and absolute paths are others.
    root.rename(tmp_path / "moved")
    assert ran(storage_root=str(tmp_path / "moved")) == []
    with sqlite3.connect(tmp_path / "moved" / "mlflow.db") as database:
        [*uris] = database.execute("SELECT artifact_uri FROM runs")
    database.close()
    assert uris
    assert all(uri.startswith((tmp_path / "moved" / "mlflow-artifacts").as_uri()) for (uri,) in uris)
    # Outputs damaged, also where Prefect remembers their results.
    for shard in (tmp_path / "moved" / "store" / "ingest").iterdir():
        (shard / "shard" / "tokens.bin").write_bytes(b"")
    for result in (tmp_path / "moved" / "prefect" / "storage").iterdir():
        result.write_text('{"met')
    assert ran(storage_root=str(tmp_path / "moved")) == ["ingest"]


@pytest.fixture
def train_once(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], str]:
    """A flow of the task `train` alone, over inputs that no stage has made; it returns the status."""
    from prefect import flow

    from dflash_core.config import RunConfig, TrackingConfig
    from tasks.train import train

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(train, "retry_delay_seconds", 0)
    config = RunConfig(storage_root=str(tmp_path), tracking=TrackingConfig(system_metrics=False))
    inputs = {"shards": [], "plans": [], "target": "t", "dataset_digest": "d", "plan_digests": ["p"]}
    inputs |= {"target_fingerprint": "f", "total_steps": 3}
    inputs |= {"dataset": {"name": "a", "files": ["a"], "profile": {"num_samples": 1}}}

    @flow
    def once(refresh: bool = False) -> str:
        return str(train(config, inputs, refresh=refresh)["status"])

    return once


def test_a_training_that_died_is_tried_again_and_resumes(
    train_once: Callable[[bool], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_core.launch import launcher
    from dflash_core.launch.launcher import TrainingFailed

    recorder = StageRecorder(monkeypatch)
    tries: list[bool] = []
    again = True

    def dies_once(run_dir: Path, config: Any, on_metrics: Any) -> dict[str, Any]:
        tries.append((run_dir / "checkpoints" / "step-00000003").exists())
        if len(tries) == 1:
            (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
            raise TrainingFailed("rank 1 (target, pid 7 on host) ended without a report", again=again)
        return recorder.launch(run_dir, config, on_metrics)

    monkeypatch.setattr(launcher, "launch", dies_once)
    assert train_once(False) == "resumed"
    assert tries == [False, True]
    assert train_once(False) == "skipped"
    assert len(tries) == 2
    tries.clear()
    # From the start, then from its checkpoint although the refresh asked for a new training.
    assert train_once(True) == "resumed"
    assert tries == [False, True]
    again = False
    tries.clear()
    with pytest.raises(TrainingFailed, match="ended without a report"):
        train_once(True)
    assert tries == [False]


def test_a_finished_run_is_skipped_only_while_its_outputs_are_those_that_it_wrote(
    train_once: Callable[[bool], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    from tasks import train

    recorder = StageRecorder(monkeypatch)
    statuses: list[str] = []
    mark_finished = train.mark_finished

    def noting_the_status(directory: Path, summary: dict[str, Any]) -> None:
        run_id = json.loads((directory / "mlflow.json").read_text())["run_id"]
        client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        statuses.append(client.get_run(run_id).info.status)
        mark_finished(directory, summary)

    monkeypatch.setattr(train, "mark_finished", noting_the_status)
    assert train_once(False) == "trained"
    run = (tmp_path / "default" / "latest").resolve()
    weights = run / "drafter" / "model.safetensors"
    written = weights.read_bytes()
    assert train_once(False) == "skipped"
    # A kill between the two would leave an MLflow run that nobody ends.
    assert statuses == ["FINISHED"]
    weights.write_bytes(written[:-1])
    with pytest.raises(UserError, match=r"model.safetensors has 31 bytes, 32 were written; restore"):
        train_once(False)
    (run / "checkpoints" / "step-00000003").mkdir(parents=True)
    assert train_once(False) == "resumed"
    assert weights.read_bytes() == written
    weights.write_bytes(bytes(len(written)))
    assert train_once(False) == "resumed"
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl has 0 bytes, .* were written; restore"):
        train_once(False)
    (run / "finished.json").write_text("{")
    assert train_once(False) == "resumed"
    assert recorder.take() == ["train"] * 4
    assert statuses == ["FINISHED"] * 4


def test_rebucket_touches_new_files_profile_edges_and_plans(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket

    recorder = StageRecorder(monkeypatch)
    rebucket(**settings)
    assert recorder.take() == sorted(["target", "ingest", "profile", "edges", *ALL_PLANS])
    write_rows(tmp_path / "data" / "b.jsonl", 30, seed=1)
    result = rebucket(**settings)
    assert recorder.take() == sorted(["ingest", "profile", "edges", *ALL_PLANS])
    assert set(result["plans"]) == {"sorted", "sorted_fresh", "random", "bucketed", "packed"}
    assert not (Path(settings["storage_root"]) / "default").exists()  # no run


def test_mistakes_in_the_data_leave_nothing(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket
    from flows.runtime.deployments import merge

    def mistake(message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            rebucket(**merge(settings, changes))

    (tmp_path / "empty").mkdir()
    question = '{"messages": [{"role": "user", "content": "Why?"}'
    (tmp_path / "prompts.jsonl").write_text(question + "]}\n")
    (tmp_path / "bad.jsonl").write_text(question + ', {"role": "assistant"}]}\nnot json\n')
    (tmp_path / "empty.jsonl").write_text("")
    mistake("data.files: .*missing.jsonl. has no file", data={"files": [str(tmp_path / "missing.jsonl")]})
    mistake("data.files: .*empty", data={"files": [str(tmp_path / "empty")]})
    mistake("no usable row", data={"files": [str(tmp_path / "bad.jsonl")]})
    mistake("prompts.jsonl' holds prompts only", data={"files": [str(tmp_path / "prompts.jsonl")]})
    mistake("empty.jsonl", data={"files": [str(tmp_path / "empty.jsonl")]})
    mistake("batching.token_budget: 20 is not allowed; allowed: at least", batching={"token_budget": 20})
    mistake("target.name: .*nowhere", target={"name": str(tmp_path / "nowhere")})
    mistake("refresh: 'training' is not allowed", refresh=["training"])
    mistake("training.epoch: unknown setting", training={"epoch": 1})
    store = Path(settings["storage_root"]) / "store"
    assert [p.name for p in (store / "ingest").iterdir() if p.name.startswith(".")] == []
    for pointer in store.glob("*/*/pointer.json"):
        assert json.loads(pointer.read_text())["stage"] in ("target", "ingest", "profile")


def test_compare_writes_one_report_over_paired_runs(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.compare_strategies import compare_strategies
    from flows.runtime.deployments import merge
    from tasks import compare

    recorder = StageRecorder(monkeypatch)
    same = {"loss": 4.0, "anchor_digest": "a"}
    monkeypatch.setattr(compare, "read_initial_loss", lambda run_dir: same)
    comparison = compare_strategies(**merge(settings, {"strategies": ["sorted", "packed"], "seeds": [0, 1]}))
    assert recorder.take().count("train") == 4
    assert set(comparison["strategies"]) == {"sorted", "packed"}
    assert comparison["seeds"] == [0, 1]
    assert comparison["anchors_equal"] is True
    assert comparison["initial_loss_spread"] == 0.0
    directory = Path(comparison["directory"])
    report = json.loads((directory / "report.json").read_text())
    assert report["recommendation"] == comparison["recommendation"]
    assert (directory.parent / "latest").resolve() == directory.resolve()
    assert {p.name for p in (directory / "plots").iterdir()} >= {"throughput.png", "loss_samples.png"}


def test_regenerated_files_are_what_is_ingested(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket
    from flows.runtime.deployments import merge

    recorder = StageRecorder(monkeypatch)
    (tmp_path / "data" / "a.jsonl").unlink()
    write_rows(tmp_path / "data" / "a.jsonl", 12, seed=0)
    settings = merge(
        settings,
        {
            "regenerate": {"enabled": True, "max_new_tokens": 8},
            "training": {"seed": 0},
            "data": {"min_validation_samples": 1, "max_reject_share": 1.0},
        },
    )

    def ran(**changes: Any) -> list[str]:
        rebucket(**merge(settings, changes))
        return [name for name in recorder.take() if name in ("regenerate", "ingest")]

    assert ran() == ["ingest", "regenerate"]
    assert ran() == []
    store = Path(settings["storage_root"]) / "store"
    [written] = (store / "regenerate").glob("*/a.jsonl")
    assert all("regenerated_by" in line for line in written.read_text().splitlines())
    [manifest] = (store / "ingest").glob("*/shard/manifest.json")
    assert json.loads(manifest.read_text())["meta"]["source"] == "a"
    # Missing outputs are rebuilt from the answers on disk, byte by byte: nothing after them runs again.
    shutil.rmtree(written.parent)
    assert ran() == ["regenerate"]
    assert ran(regenerate={"batch_size": 2}) == []
    assert ran(regenerate={"max_new_tokens": 9}) == ["ingest", "regenerate"]
    write_rows(tmp_path / "data" / "b.jsonl", 12, seed=1)
    assert ran() == ["ingest", "regenerate"]
    assert ran(regenerate={"enabled": False}) == ["ingest", "ingest"]
