"""Keys, pointers and publication of stages, without an engine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_core.config import RunConfig, from_dict, to_dict
from dflash_core.files import content_digest
from tasks.storage import run_directory as runs
from tasks.storage import stages
from tasks.storage.file_digests import FileDigests, resolution_seconds
from tasks.storage.stages import Stage, read_complete

INPUTS = {"text_digest": "d1", "times": 2, "path": "somewhere"}


def repeat(out: Path, *, text_digest: str, times: int, path: str) -> dict:
    (out / "deep").mkdir()
    (out / "deep" / "text").write_text(text_digest * times)
    return {"length": len(text_digest) * times}


def make(function=repeat, version: int = 1) -> Stage:
    return Stage(function, name="repeat", version=version, locations=("path",))


def produce(stage: Stage, root: Path, inputs: dict | None = None, refresh: bool = False) -> dict:
    inputs = INPUTS if inputs is None else inputs
    return stage.produce(str(root), inputs, key=stage.key(inputs), label="label", refresh=refresh, after=[])


def test_digest_ignores_the_order_of_keys() -> None:
    assert content_digest({"a": 1, "b": [2, 3]}) == content_digest({"b": [2, 3], "a": 1})
    assert content_digest({"a": 1}) != content_digest({"a": "1"})
    assert content_digest([1, 2]) != content_digest([2, 1])


def test_key_holds_inputs_and_code_version_but_no_location() -> None:
    key = make().key(INPUTS)
    assert make().key({**INPUTS, "path": "elsewhere"}) == key
    assert make().key({**INPUTS, "times": 3}) != key
    assert make(version=2).key(INPUTS) != key


def test_outputs_appear_whole_under_their_key(tmp_path: Path) -> None:
    stage = make()
    pointer = produce(stage, tmp_path)
    assert pointer["path"] == f"store/repeat/{stage.key(INPUTS)}"  # relative: the root may move
    assert pointer["files"] == ["deep/text"] and pointer["length"] == 4
    directory = tmp_path / pointer["path"]
    assert (directory / "deep" / "text").read_text() == "d1d1"
    assert json.loads((directory / "pointer.json").read_text()) == pointer
    assert read_complete(directory)
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]  # no temporary names left


def test_what_is_there_is_used_and_what_is_gone_is_made_again(tmp_path: Path) -> None:
    calls = []

    def counted(out: Path, **inputs) -> dict:
        calls.append(inputs["times"])
        return repeat(out, **inputs)

    stage = make(counted)
    first = produce(stage, tmp_path)
    assert produce(stage, tmp_path) == first and calls == [2]
    (tmp_path / first["path"] / "deep" / "text").unlink()
    assert not read_complete(tmp_path / first["path"])
    assert produce(stage, tmp_path) == first and calls == [2, 2]
    assert read_complete(tmp_path / first["path"])
    produce(stage, tmp_path, refresh=True)
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("shown, submitted", [(3, [0, 1, 2, 3]), (2, [3])])
def test_many_that_are_up_to_date_are_read_without_a_task_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int, submitted: list[int]
) -> None:
    """Of four calls the first three are up to date."""
    stage, seen = make(), []
    calls = [{"label": str(i), "after": [], **INPUTS, "times": i} for i in range(4)]
    inputs = [{**INPUTS, "times": i} for i in range(4)]
    expected = [produce(stage, tmp_path, i) for i in inputs[:3]]

    def submit(storage_root: Path, **call) -> SimpleNamespace:
        seen.append(call["times"])
        return SimpleNamespace(result=lambda timeout: produce(stage, storage_root, inputs[call["times"]]))

    monkeypatch.setattr(stage, "submit", submit)
    monkeypatch.setattr(stages, "SHOWN_CACHED", shown)
    monkeypatch.setattr(stages, "get_run_logger", lambda: logging.getLogger("test"))
    found = stage.map(tmp_path, calls)
    assert seen == submitted and found[:3] == expected and found[3]["length"] == 6
    seen.clear()
    stage.map(tmp_path, calls, refresh=True)
    assert seen == [0, 1, 2, 3]


def test_a_failing_stage_leaves_nothing(tmp_path: Path) -> None:
    def half(out: Path, **inputs) -> dict:
        (out / "half").write_text("x")
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        produce(make(half), tmp_path)
    assert list((tmp_path / "store" / "repeat").iterdir()) == []


def test_a_stage_killed_half_way_is_not_used_and_is_cleaned_up(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.unit import test_stages as t
from pathlib import Path
def die(out, **inputs):
    (out / "half").write_text("x")
    os.kill(os.getpid(), 9)
t.produce(t.make(die), Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ}, timeout=60)
    assert killed.returncode == -9
    assert len(list((tmp_path / "store" / "repeat").iterdir())) == 1  # the temporary directory
    assert not read_complete(make().directory(tmp_path, INPUTS))
    pointer = produce(make(), tmp_path)
    assert [p.name for p in (tmp_path / "store" / "repeat").iterdir()] == [Path(pointer["path"]).name]


def test_file_digests_trust_size_and_time_only_when_the_file_was_at_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    old = time.time_ns() - 10_000_000_000
    os.utime(path, ns=(old, old))
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # sha256 of "one"
    digests.save()
    path.write_text("two")
    os.utime(path, ns=(old, old))  # same size, same time: what the memory is for
    assert FileDigests(tmp_path).of(path) == first
    os.utime(path, ns=(old + 1, old + 1))
    assert FileDigests(tmp_path).of(path) != first


@pytest.mark.parametrize("mtime_ns, seconds", [(5_000_000_000, 2.0), (5_000_000_001, 0.05)])
def test_the_resolution_of_a_time_in_whole_seconds_is_two_seconds(mtime_ns: int, seconds: float) -> None:
    assert resolution_seconds(mtime_ns) == seconds


def test_a_file_written_just_now_is_read_once_its_time_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten at the same length within the same tick, its last text counts; and nothing is read twice."""
    path, waited = tmp_path / "a.jsonl", []
    path.write_text("new")
    written = time.time_ns() // 1000 * 1000 + 1  # no whole second
    os.utime(path, ns=(written, written))

    def rewrite_meanwhile(seconds: float) -> None:
        waited.append(seconds)
        path.write_text("now")
        os.utime(path, ns=(written, written))

    monkeypatch.setattr(time, "sleep", rewrite_meanwhile)
    monkeypatch.setattr(time, "time_ns", lambda: written + 1_000_000)
    digests = FileDigests(tmp_path)
    assert digests.of(path) == hashlib.sha256(b"now").hexdigest()
    assert waited == [pytest.approx(0.049)]
    digests.save()
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    again = FileDigests(tmp_path)
    assert again.of(path) == hashlib.sha256(b"now").hexdigest()
    assert not again.is_changed


def test_a_file_from_the_future_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    future = time.time_ns() + 3_600_000_000_000
    os.utime(path, ns=(future, future))
    digests = FileDigests(tmp_path)
    first = digests.of(path)
    path.write_text("two")
    os.utime(path, ns=(future, future))
    assert digests.of(path) != first


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
        {"batching": {"num_buckets": 3}},  # the strategy is packed: its plans are the same
        {"data": {"files": ["moved.jsonl"]}},  # same shards, by digest
        {"regenerate": {"enabled": True, "temperature": 1.0}},  # enters by the digest of the data alone
    ],
)
def test_run_key_ignores_what_does_not_decide_the_result(tmp_path: Path, sections: dict) -> None:
    assert (
        runs.find_run(config_of(**sections), fields_of(config_of(**sections))).key
        == runs.find_run(config_of(), fields_of(config_of())).key
    )


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


def test_differences_name_each_field() -> None:
    old, new = fields_of(config_of()), fields_of(config_of(training={"seed": 1}), dataset_digest="other")
    assert runs.differences(old, new) == ["data", "training.seed: 0 -> 1"]
    assert runs.differences(old, old) == []


def test_latest_is_a_relative_link_replaced_at_once(tmp_path: Path) -> None:
    config = config_of(storage_root=str(tmp_path), deployment="d")
    for seed in (0, 1):
        run = runs.find_run(config, fields_of(config_of(training={"seed": seed})))
        run.directory.mkdir(parents=True)
        runs.point_latest(run.directory)
        assert os.readlink(tmp_path / "d" / "latest") == run.directory.name
        assert len(run.directory.name) == 12
    assert sorted(p.name for p in (tmp_path / "d").iterdir() if not p.name[0].isalnum()) == []


def test_resumed_run_keeps_its_deciding_settings_and_takes_new_execution_settings(tmp_path: Path) -> None:
    """A checkpoint remembers the settings it was made with; those that changed nothing must not refuse it."""
    before = config_of(storage_root=str(tmp_path), batching={"num_buckets": 6}, data={"files": ["a"]})
    after = config_of(
        storage_root=str(tmp_path),
        batching={"num_buckets": 3},
        data={"files": ["b"]},
        training={"max_draft_slots": 64},
    )
    run = runs.find_run(before, fields_of(before))
    run.directory.mkdir(parents=True)
    runs.prepare_directory(run, before, {}, total_steps=1, mlflow_run_id="m")
    described = json.loads((run.directory / "run.json").read_text())
    del described["config"]["regenerate"]  # a run of a time that had no such section
    (run.directory / "run.json").write_text(json.dumps(described))
    runs.prepare_directory(run, after, {}, total_steps=1, mlflow_run_id="m")
    written = from_dict(RunConfig, json.loads((run.directory / "run.json").read_text())["config"])
    assert written.batching.num_buckets == 6 and written.data.files == ("a",)
    assert written.training.max_draft_slots == 64
    assert to_dict(written)["optimizer"] == to_dict(before)["optimizer"]


def test_the_template_that_renders_prompt_files_decides_an_evaluation(tmp_path: Path) -> None:
    from dflash_core.config import EvaluationConfig
    from tasks.evaluate import evaluation_inputs

    for name in ("config.json", "model.safetensors", "a.jinja", "b.jinja"):
        (tmp_path / name).write_text(name)

    def digest(template: str | None, *prompts: str) -> object:
        inputs = evaluation_inputs(
            EvaluationConfig(prompts=prompts),
            drafter_directory=tmp_path,
            target_fingerprint="t",
            sets=[],
            chat_template=template and str(tmp_path / template),
            digests=FileDigests(tmp_path),
        )
        return inputs["chat_template_digest"]

    assert digest("a.jinja", "p.jsonl") != digest("b.jinja", "p.jsonl")
    assert digest(None, "p.jsonl") is None
    assert digest("a.jinja") is None  # prompts of the validation samples are tokens already
