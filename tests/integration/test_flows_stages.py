"""Which stages run again after which change, in one process against a temporary Prefect server.

Training and evaluation are replaced by functions that write what the real ones leave behind, so that a row
costs a second; `test_flows_command.py` runs the real ones. Rows build on the state that the row before left.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import UserError
from tests.integration.flow_runs import BASE, write_rows

ALL_PLANS = ["plan"] * 10  # five strategies, two epochs


class Recorder:
    """Replaces the bodies of stages by ones that note their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dflash_core.launch import launcher
        from tasks import report
        from tasks.reporting import mlflow_client as tracking
        from tasks.storage.stages import STAGES

        self.ran: list[str] = []
        for stage in STAGES.values():
            body = self._evaluate if stage.name == "evaluate" else stage.function
            monkeypatch.setattr(stage, "function", self._noting(stage.name, body))
        monkeypatch.setattr(launcher, "launch", self._launch)
        monkeypatch.setattr(report, "draw_plots", lambda *_: None)
        for name in ("log_summary", "register_drafter"):
            monkeypatch.setattr(tracking, name, lambda *_, **__: None)

    def _noting(self, name: str, body: Any) -> Any:
        def noted(out: Path, **inputs: Any) -> dict[str, Any]:
            self.ran.append(name)
            return body(out, **inputs)

        return noted

    def _evaluate(self, out: Path, **inputs: Any) -> dict[str, Any]:
        figures = {
            "acceptance_length": 1.5,
            "acceptance_interval": [1.2, 1.8],
            "prompts": 2,
            "lossless": True,
        }
        (out / "evaluation.json").write_text("{}")
        return {"evaluation": {**figures, "acceptance_by_position": [0.5], "sets": {}}}

    def _launch(self, run_dir: Path, config: Any, on_metrics: Any) -> dict[str, Any]:
        self.ran.append("train")
        described = json.loads((run_dir / "run.json").read_text())
        lines = [
            {
                "step": step,
                "time_ms": int(time.time() * 1000),
                "train/loss": 3.0 / step,
                "validation/loss": 2.0,
                **dict.fromkeys(("batch/tokens", "batch/num_samples", "batch/mean_length"), 9.0),
                **dict.fromkeys(("perf/step_seconds", "perf/capture_seconds", "perf/drafter_seconds"), 1.0),
            }
            for step in range(1, described["total_steps"] + 1)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        on_metrics(lines)
        (run_dir / "drafter").mkdir()
        (run_dir / "drafter" / "config.json").write_text("{}")
        (run_dir / "drafter" / "model.safetensors").write_text(described["run_key"])
        summary = {
            "steps": len(lines),
            "updates": len(lines),
            "samples": 1,
            "tokens": 10,
            "tokens_per_second": 5.0,
        }
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return summary

    def take(self) -> list[str]:
        ran, self.ran = sorted(self.ran), []
        return ran


@pytest.fixture(scope="module")
def harness() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def place(
    tmp_path: Path, tiny_target_dir: Path, harness: None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Settings of a run of its own: one data file, the tiny target, an MLflow database under tmp_path."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    write_rows(tmp_path / "data" / "a.jsonl", 60, seed=0)
    return {
        **BASE,
        "storage_root": str(tmp_path / "runs"),
        "target": {"name": str(tmp_path / "target")},
        "data": {"files": [str(tmp_path / "data")], "min_validation_samples": 4},
        "tracking": {"system_metrics": False},
    }


def test_what_reruns_after_which_change(place: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sql
    from flows.runtime.deployments import merge
    from flows.train_dflash import train_dflash

    recorder = Recorder(monkeypatch)

    def ran(**changes: Any) -> list[str]:
        train_dflash(**merge(place, changes))
        return recorder.take()

    cold = ["edges", "evaluate", "ingest", *ALL_PLANS, "profile", "target", "train"]
    assert ran() == sorted(cold)
    assert ran() == []
    for path in (tmp_path / "data" / "a.jsonl", tmp_path / "target" / "config.json"):
        os.utime(path, ns=(1, 1))  # only the time
    assert ran() == []
    # execution settings
    assert ran(training={"max_draft_slots": 128, "log_every": 7, "checkpoint_every_steps": 3}) == []
    # the strategy is packed: a number of buckets changes the edges and the plans of `bucketed`, for the
    # report
    assert ran(batching={"num_buckets": 3}) == ["edges", "plan", "plan"]
    assert ran(evaluation={"num_prompts": 3}) == ["evaluate"]
    assert ran(optimizer={"lr": 0.002}) == ["evaluate", "train"]
    assert ran(drafter={"num_layers": 2}) == ["evaluate", "train"]
    assert ran(training={"seed": 1}) == sorted([*ALL_PLANS, "train", "evaluate"])
    assert ran(batching={"strategy": "bucketed"}) == ["evaluate", "train"]
    assert ran(batching={"strategy": "bucketed", "num_buckets": 3}) == ["evaluate", "train"]  # planned above
    budget = ran(batching={"token_budget": 600})
    assert budget == sorted(["edges", *ALL_PLANS, "train", "evaluate"])
    # SQL text with the same result: early cutoff
    read = sql.read
    monkeypatch.setattr(sql, "read", lambda name: read(name) + "\n-- another text\n")
    assert ran() == ["profile"]
    monkeypatch.setattr(sql, "read", read)
    # outputs of one stage deleted
    root = Path(place["storage_root"])
    [shard] = (root / "store" / "ingest").iterdir()
    (shard / "shard" / "tokens.bin").unlink()
    assert ran() == ["ingest"]
    # another tokenizer: all ingest and what follows; equal lengths, so profile, edges and plans stay
    path = tmp_path / "target" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("{", '{"a_note": "another tokenizer",', 1))
    assert ran() == ["evaluate", "ingest", "target", "train"]
    # other weights, the same tokenizer
    weights = tmp_path / "target" / "generation_config.json"
    weights.write_text(weights.read_text().replace("{", '{"a_note": "another target",', 1))
    assert ran() == ["evaluate", "target", "train"]
    # one more file: its ingest alone
    write_rows(tmp_path / "data" / "b.jsonl", 30, seed=1)
    assert ran() == sorted(["ingest", "profile", "edges", *ALL_PLANS, "train", "evaluate"])
    (tmp_path / "data" / "b.jsonl").unlink()
    assert ran() == []  # everything of the earlier data is still there
    assert ran(refresh=["profile"]) == ["profile"]


def test_a_training_that_died_is_tried_again_and_goes_on(
    tmp_path: Path, harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow

    from dflash_core.config import RunConfig, TrackingConfig
    from dflash_core.launch import launcher
    from dflash_core.launch.launcher import TrainingFailed
    from tasks.train import train

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(train, "retry_delay_seconds", 0)
    recorder = Recorder(monkeypatch)
    config = RunConfig(storage_root=str(tmp_path), tracking=TrackingConfig(system_metrics=False))
    inputs = {"shards": [], "plans": [], "target": "t", "dataset_digest": "d", "plan_digests": ["p"]}
    inputs |= {"target_fingerprint": "f", "total_steps": 3}
    inputs |= {"dataset": {"name": "a", "files": ["a"], "profile": {"num_samples": 1}}}
    tries: list[bool] = []
    again = True

    def dies_once(run_dir: Path, config: Any, on_metrics: Any) -> dict[str, Any]:
        tries.append((run_dir / "checkpoints" / "step-00000003").exists())
        if len(tries) == 1:
            (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True)
            raise TrainingFailed("rank 1 (target, pid 7 on host) ended without a report", again=again)
        return recorder._launch(run_dir, config, on_metrics)

    @flow
    def once(refresh: bool) -> str:
        return str(train(config, inputs, refresh=refresh)["status"])

    monkeypatch.setattr(launcher, "launch", dies_once)
    assert once(False) == "resumed" and tries == [False, True]
    assert once(False) == "skipped" and len(tries) == 2
    tries.clear()
    assert once(True) == "resumed"
    assert tries == [
        False,
        True,
    ]  # from the start, then from its checkpoint although it was to be trained anew
    again = False
    tries.clear()
    with pytest.raises(TrainingFailed, match="ended without a report"):
        once(True)
    assert tries == [False]


def test_rebucket_touches_new_files_profile_edges_and_plans(
    place: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket

    recorder = Recorder(monkeypatch)
    rebucket(**place)
    assert recorder.take() == sorted(["target", "ingest", "profile", "edges", *ALL_PLANS])
    write_rows(tmp_path / "data" / "b.jsonl", 30, seed=1)
    result = rebucket(**place)
    assert recorder.take() == sorted(["ingest", "profile", "edges", *ALL_PLANS])
    assert set(result["plans"]) == {"sorted", "sorted_fresh", "random", "bucketed", "packed"}
    assert not (Path(place["storage_root"]) / "default").exists()  # no run


def test_mistakes_in_the_data_leave_nothing(
    place: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket
    from flows.runtime.deployments import merge

    def mistake(message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            rebucket(**merge(place, changes))

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
    store = Path(place["storage_root"]) / "store"
    assert [p.name for p in (store / "ingest").iterdir() if p.name.startswith(".")] == []
    for pointer in store.glob("*/*/pointer.json"):
        assert json.loads(pointer.read_text())["stage"] in ("target", "ingest", "profile")


def test_compare_writes_one_report_over_paired_runs(place: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.compare_strategies import compare_strategies
    from flows.runtime.deployments import merge
    from tasks import compare

    recorder = Recorder(monkeypatch)
    same = {"loss": 4.0, "anchor_digest": "a"}
    monkeypatch.setattr(compare, "read_initial_loss", lambda run_dir: same)
    found = compare_strategies(**merge(place, {"strategies": ["sorted", "packed"], "seeds": [0, 1]}))
    assert recorder.take().count("train") == 4
    assert set(found["strategies"]) == {"sorted", "packed"} and found["seeds"] == [0, 1]
    assert found["anchors_equal"] is True and found["initial_loss_spread"] == 0.0
    directory = Path(found["directory"])
    assert json.loads((directory / "report.json").read_text())["recommendation"] == found["recommendation"]
    assert (directory.parent / "latest").resolve() == directory.resolve()
    assert {p.name for p in (directory / "plots").iterdir()} >= {"throughput.png", "loss_samples.png"}


def test_flow_runs_without_a_process_are_marked_as_crashed(
    harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Running

    from flows.runtime import crashed_runs as abandoned

    monkeypatch.setattr(abandoned, "_notes", lambda: tmp_path)
    a_flow = flow(lambda: None, name="a-flow")
    with get_client(sync_client=True) as client:
        gone, alive = (client.create_flow_run(a_flow, state=Running()) for _ in range(2))
        with abandoned.noted(str(gone.id)), abandoned.noted(str(alive.id)):
            note = tmp_path / f"{gone.id}.json"
            note.write_text(json.dumps(json.loads(note.read_text()) | {"started": 0.0}))
            assert abandoned.close_abandoned() == [gone.name]
            assert abandoned.close_abandoned() == []
        states = [client.read_flow_run(run.id).state.type.value for run in (gone, alive)]
    assert states == ["CRASHED", "RUNNING"] and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ingest_on_a_dask_cluster_writes_the_same_bytes(place: dict) -> None:
    """Two worker processes against threads: every file of every shard and every plan is byte-equal."""
    pytest.importorskip("prefect_dask", reason="the extra `dask` is not installed")
    from flows.rebucket import rebucket

    root = Path(place["storage_root"])
    for seed in (1, 2, 3):
        write_rows(Path(place["data"]["files"][0]) / f"more-{seed}.jsonl", 20, seed=seed)

    def written() -> dict[str, bytes]:
        found = {}
        for stage in ("ingest", "plan"):
            for path in (root / "store" / stage).rglob("*"):
                if path.is_file():
                    found[path.relative_to(root).as_posix()] = path.read_bytes()
        return found

    rebucket(**place)
    expected = written()
    assert sum(name.endswith("tokens.bin") for name in expected) == 4
    shutil.rmtree(root / "store")
    rebucket(**{**place, "task_runner": "dask"})
    assert written() == expected


def test_a_runner_that_is_not_installed_is_one_message(place: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from flows.rebucket import rebucket

    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    with pytest.raises(UserError, match=r"task_runner: 'ray' needs a package.*train-dflash\[ray\]"):
        rebucket(**{**place, "task_runner": "ray"})


def test_regenerated_files_are_what_is_ingested(
    place: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.rebucket import rebucket
    from flows.runtime.deployments import merge

    recorder = Recorder(monkeypatch)
    (tmp_path / "data" / "a.jsonl").unlink()
    write_rows(tmp_path / "data" / "a.jsonl", 12, seed=0)
    settings = merge(
        place,
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
    store = Path(place["storage_root"]) / "store"
    [written] = (store / "regenerate").glob("*/a.jsonl")
    assert all("regenerated_by" in line for line in written.read_text().splitlines())
    [manifest] = (store / "ingest").glob("*/shard/manifest.json")
    assert json.loads(manifest.read_text())["meta"]["source"] == "a"
    # outputs that are gone come back from the answers on disk, byte by byte: nothing after them runs again
    shutil.rmtree(written.parent)
    assert ran() == ["regenerate"]
    assert ran(regenerate={"batch_size": 2}) == []
    assert ran(regenerate={"max_new_tokens": 9}) == ["ingest", "regenerate"]
    write_rows(tmp_path / "data" / "b.jsonl", 12, seed=1)
    assert ran() == ["ingest", "regenerate"]
    assert ran(regenerate={"enabled": False}) == ["ingest", "ingest"]
