"""Run keys, run.json and the link to the latest run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from dflash_core.config import RunConfig, from_dict, to_dict
from dflash_core.errors import UserError
from dflash_core.files import content_digest
from tasks.storage import run_directory as runs


def config_of(**sections) -> RunConfig:
    return from_dict(RunConfig, {"drafter": {"mask_token_id": 3}, **sections})


def fields_of(config: RunConfig, **changes) -> dict:
    given = {"dataset_digest": "data", "plan_digests": ["p0"], "target_fingerprint": "t"} | changes
    return runs.decisive_fields(config, **given)


@pytest.mark.parametrize(
    "sections",
    [
        {
            "training": {
                "topology": "split",
                "max_draft_slots": 64,
                "log_every": 9,
                "checkpoint_every_steps": 3,
            }
        },
        {"target": {"cache": "memory", "compute_dtype": "float32"}},
        {"evaluation": {"num_prompts": 3}, "tracking": {"experiment": "other"}},
        # The strategy is packed: its plans are the same.
        {"batching": {"num_buckets": 3}},
        # The same shards, by digest.
        {"data": {"files": ["moved.jsonl"]}},
        # Enters by the digest of the data alone.
        {"regenerate": {"enabled": True, "temperature": 1.0}},
    ],
)
def test_run_key_ignores_what_does_not_decide_the_result(tmp_path: Path, sections: dict) -> None:
    changed = config_of(**sections)
    expected = runs.find_run(config_of(), fields_of(config_of())).key
    assert runs.find_run(changed, fields_of(changed)).key == expected


@pytest.mark.parametrize(
    "sections, changes",
    [
        ({"drafter": {"mask_token_id": 3, "num_layers": 2}}, {}),
        ({"optimizer": {"lr": 1e-3}}, {}),
        ({"training": {"seed": 1}}, {}),
        ({"training": {"epochs": 2}}, {}),
        ({"objective": {"labels": "target"}}, {}),
        ({"target": {"feature_dtype": "bfloat16"}}, {}),
        ({}, {"dataset_digest": "other"}),
        ({}, {"plan_digests": ["p1"]}),
        ({}, {"target_fingerprint": "u"}),
    ],
)
def test_run_key_changes_with_what_decides_the_result(sections: dict, changes: dict) -> None:
    config = config_of(**sections)
    assert content_digest(fields_of(config, **changes)) != content_digest(fields_of(config_of()))


def test_changed_fields_are_named() -> None:
    old, new = fields_of(config_of()), fields_of(config_of(training={"seed": 1}), dataset_digest="other")
    assert runs.changed_fields(old, new) == ["data", "training.seed: 0 -> 1"]
    assert runs.changed_fields(old, old) == []


def test_latest_is_a_relative_link_replaced_by_one_rename(tmp_path: Path) -> None:
    config = config_of(storage_root=str(tmp_path), deployment="d")
    for seed in (0, 1):
        run = runs.find_run(config, fields_of(config_of(training={"seed": seed})))
        run.path.mkdir(parents=True)
        runs.point_latest(run.path)
        assert os.readlink(tmp_path / "d" / "latest") == run.path.name
        assert len(run.path.name) == 12
    assert sorted(p.name for p in (tmp_path / "d").iterdir() if not p.name[0].isalnum()) == []


def test_resumed_run_keeps_its_deciding_settings_and_takes_new_execution_settings(tmp_path: Path) -> None:
    """A checkpoint holds its settings; a change that left shards and plans equal must not prevent it."""
    before = config_of(storage_root=str(tmp_path), batching={"num_buckets": 6}, data={"files": ["a"]})
    after = config_of(
        storage_root=str(tmp_path),
        batching={"num_buckets": 3},
        data={"files": ["b"]},
        training={"max_draft_slots": 64},
    )
    run = runs.find_run(before, fields_of(before))
    run.path.mkdir(parents=True)
    runs.write_run(run, before, {}, total_steps=1, mlflow_run_id="m")
    contents = json.loads((run.path / "run.json").read_text())
    # A run.json from before this section existed.
    del contents["config"]["regenerate"]
    (run.path / "run.json").write_text(json.dumps(contents))
    runs.write_run(run, after, {}, total_steps=1, mlflow_run_id="m")
    written = from_dict(RunConfig, json.loads((run.path / "run.json").read_text())["config"])
    assert written.batching.num_buckets == 6
    assert written.data.files == ("a",)
    assert written.training.max_draft_slots == 64
    assert to_dict(written)["optimizer"] == to_dict(before)["optimizer"]


def test_paths_under_the_storage_root_are_relative_to_the_run(tmp_path: Path) -> None:
    """The root may be moved; a target elsewhere stays where it is."""
    config = config_of(storage_root=str(tmp_path), deployment="d")
    run = runs.find_run(config, fields_of(config))
    run.path.mkdir(parents=True)
    shard = tmp_path / "store" / "ingest" / "a" / "shard"
    paths = {"run": str(run.path), "target": "/elsewhere/model", "shards": [str(shard)]}
    runs.write_run(run, config, paths, total_steps=1, mlflow_run_id="m")
    contents = json.loads((run.path / "run.json").read_text())
    expected = {"run": ".", "target": "/elsewhere/model", "shards": ["../../store/ingest/a/shard"]}
    assert contents["paths"] == expected


def test_a_resume_remarks_on_other_versions_and_code(tmp_path: Path) -> None:
    config = config_of(storage_root=str(tmp_path), deployment="d")
    run = runs.find_run(config, fields_of(config))
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert runs.write_run(run, config, {}, total_steps=1, mlflow_run_id="m") == []
    assert runs.write_run(run, config, {}, total_steps=1, mlflow_run_id="m") == []
    contents = json.loads((run.path / "run.json").read_text())
    assert contents["made_with"].keys() >= {"torch", "transformers", "numpy"}
    contents["made_with"]["torch"] = "1.0.0"
    contents["code"]["dflash_core/training/loop.py"] = "other"
    (run.path / "run.json").write_text(json.dumps(contents))
    remarks = runs.write_run(run, config, {}, total_steps=1, mlflow_run_id="m")
    assert "torch 1.0.0, now" in remarks[0]
    assert remarks[1].endswith(": dflash_core/training/loop.py")
    # Told once: the run has continued with this code.
    assert runs.write_run(run, config, {}, total_steps=1, mlflow_run_id="m") == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "\x00"])
def test_a_damaged_run_json_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert runs.read_run(tmp_path) is None


def test_damaged_files_of_a_finished_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"steps"')
    with pytest.raises(UserError, match=r"summary\.json cannot be read: .* restore .* or train it again"):
        runs.read_json(tmp_path / "summary.json")
    with pytest.raises(UserError, match=r"mlflow\.json cannot be read"):
        runs.read_json(tmp_path / "mlflow.json")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\x00\x00\n{"step": 3')
    with pytest.raises(UserError, match=r"metrics\.jsonl has a line that is not JSON"):
        runs.read_metrics(tmp_path)


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    run = tmp_path / "d" / "run"
    holder = rf"run .*d/run is in use by process {os.getpid()} on {socket.gethostname()}; wait for it"
    with runs.locked(run):
        with pytest.raises(UserError, match=holder), runs.locked(run):
            pass
        (run / "file").touch()
        runs.empty(runs.RunDirectory(path=run, key="k", fields={}))
        assert [path.name for path in run.iterdir()] == [".lock"]
        # Emptied or removed, it is still the holder's, or free.
        with pytest.raises(UserError, match=holder), runs.locked(run):
            pass
    with runs.locked(run, wait=True):
        assert (run / ".lock").read_text().startswith("process ")


def test_a_run_that_is_discarded_leaves_the_link_of_another_flow(tmp_path: Path) -> None:
    first, second, third = (
        runs.RunDirectory(path=tmp_path / "d" / name, key=name, fields={}) for name in ("a", "b", "c")
    )
    for run in (first, second, third):
        run.path.mkdir(parents=True)
    runs.point_latest(first.path)
    previous = runs.point_latest(second.path)
    runs.point_latest(third.path)
    runs.discard(second, previous)
    assert os.readlink(tmp_path / "d" / "latest") == "c"
    runs.discard(third, previous)
    assert os.readlink(tmp_path / "d" / "latest") == "a"
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["a", "latest"]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', "[" * 100_000, "3"])
def test_metrics_that_no_rank_wrote_are_one_message(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "time_ms": 2}}\n{line}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl has a line .*; restore the run's directory"):
        runs.read_metrics(tmp_path)
    (tmp_path / "run.json").write_text(line)
    assert runs.read_run(tmp_path) is None
