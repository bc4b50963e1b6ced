"""Keys, pointers and publication of stages, without Prefect's engine."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.storage import provenance, stages
from tasks.storage.pointers import read_complete
from tasks.storage.stages import Stage

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


def test_key_holds_inputs_and_code_version_but_no_location() -> None:
    key = make().key(INPUTS)
    assert make().key({**INPUTS, "path": "elsewhere"}) == key
    assert make().key({**INPUTS, "times": 3}) != key
    assert make(version=2).key(INPUTS) != key


def test_inputs_of_the_key_alone_are_not_passed(tmp_path: Path) -> None:
    def write(out: Path, *, times: int) -> dict:
        return {"times": times}

    stage = Stage(write, name="repeat", version=1, key_only=("text_digest",))
    assert produce(stage, tmp_path, {"times": 2, "text_digest": "d1"})["times"] == 2
    assert stage.key({"times": 2, "text_digest": "d1"}) != stage.key({"times": 2, "text_digest": "d2"})
    with pytest.raises(AssertionError, match="text_digest"):
        stage.key({"times": 2})


def test_outputs_appear_complete_under_their_key(tmp_path: Path) -> None:
    stage = make()
    pointer = produce(stage, tmp_path)
    # The path is relative, since the root may move.
    assert pointer["path"] == f"store/repeat/{stage.key(INPUTS)}"
    assert pointer["files"] == {"deep/text": 4}
    assert pointer["length"] == 4
    directory = tmp_path / pointer["path"]
    assert (directory / "deep" / "text").read_text() == "d1d1"
    assert json.loads((directory / "pointer.json").read_text()) == pointer
    assert read_complete(directory)
    # No temporary directory is left.
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]


def test_existing_outputs_are_used_and_missing_ones_are_made_again(tmp_path: Path) -> None:
    calls = []

    def counted(out: Path, **inputs) -> dict:
        calls.append(inputs["times"])
        return repeat(out, **inputs)

    stage = make(counted)
    first = produce(stage, tmp_path)
    assert produce(stage, tmp_path) == first
    assert calls == [2]
    (tmp_path / first["path"] / "deep" / "text").unlink()
    assert not read_complete(tmp_path / first["path"])
    assert produce(stage, tmp_path) == first
    assert calls == [2, 2]
    assert read_complete(tmp_path / first["path"])
    produce(stage, tmp_path, refresh=True)
    assert calls == [2, 2, 2]


@pytest.mark.parametrize("shown, submitted", [(3, [0, 1, 2, 3]), (2, [3])])
def test_many_that_are_up_to_date_are_read_without_a_task_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int, submitted: list[int]
) -> None:
    """Of four calls the first three are up to date."""
    stage, submissions = make(), []
    calls = [{"label": str(i), "after": [], **INPUTS, "times": i} for i in range(4)]
    inputs = [{**INPUTS, "times": i} for i in range(4)]
    expected = [produce(stage, tmp_path, i) for i in inputs[:3]]

    def submit(storage_root: Path, **call) -> SimpleNamespace:
        submissions.append(call["times"])
        return SimpleNamespace(result=lambda timeout: produce(stage, storage_root, inputs[call["times"]]))

    monkeypatch.setattr(stage, "submit", submit)
    monkeypatch.setattr(stages, "SHOWN_CACHED", shown)
    monkeypatch.setattr(stages, "get_run_logger", lambda: logging.getLogger("test"))
    pointers = stage.map(tmp_path, calls)
    assert submissions == submitted
    assert pointers[:3] == expected
    assert pointers[3]["length"] == 6
    submissions.clear()
    stage.map(tmp_path, calls, refresh=True)
    assert submissions == [0, 1, 2, 3]


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
sys.path.insert(0, {str(Path(__file__).resolve().parents[4])!r})
from tests.unit.tasks.storage import test_stages as t
from pathlib import Path
def die(out, **inputs):
    (out / "half").write_text("x")
    os.kill(os.getpid(), 9)
t.produce(t.make(die), Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ}, timeout=60)
    assert killed.returncode == -9
    # The temporary directory.
    assert len(list((tmp_path / "store" / "repeat").iterdir())) == 1
    assert not read_complete(make().directory(tmp_path, INPUTS))
    pointer = produce(make(), tmp_path)
    assert [p.name for p in (tmp_path / "store" / "repeat").iterdir()] == [Path(pointer["path"]).name]


@pytest.mark.parametrize(
    "name, contents, defect",
    [
        ("pointer.json", '{"key"', "pointer.json cannot be read"),
        ("pointer.json", "\x00\xff", "pointer.json cannot be read"),
        ("pointer.json", "[1]", "pointer.json is not the pointer of this output"),
        ("pointer.json", '{"key": "other", "files": []}', "pointer.json is not the pointer of this output"),
        ("pointer.json", None, "pointer.json cannot be read"),
        ("deep/text", "", "deep/text has 0 bytes, 4 were written"),
        ("deep/text", None, "deep/text is not a file"),
    ],
)
def test_damaged_outputs_are_made_again_with_a_remark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, contents: str | None, defect: str
) -> None:
    first = produce(make(), tmp_path)
    damaged = tmp_path / first["path"] / name
    damaged.unlink()
    if contents is None:
        damaged.mkdir()
    else:
        damaged.write_text(contents)
    with caplog.at_level(logging.WARNING, "prefect.train_dflash.stages"):
        assert produce(make(), tmp_path) == first
    [remark] = caplog.messages
    assert defect in remark
    assert remark.endswith("it is made anew")
    assert (tmp_path / first["path"] / "deep" / "text").read_text() == "d1d1"


def test_a_pointer_without_sizes_is_still_used(tmp_path: Path) -> None:
    pointer = produce(make(), tmp_path)
    path = tmp_path / pointer["path"] / "pointer.json"
    path.write_text(json.dumps(pointer | {"files": ["deep/text"]}))
    assert read_complete(path.parent)
    (path.parent / "deep" / "text").unlink()
    assert not read_complete(path.parent)


@pytest.mark.parametrize("is_costly", [False, True])
def test_versions_count_by_the_written_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_costly: bool
) -> None:
    """A cheap stage runs again for 2.9 after 2.8; otherwise outputs are kept, with one remark."""
    installed = {"torch": "2.8.0+cpu"}
    monkeypatch.setattr(provenance, "version_of", installed.get)
    arguments = {"name": "repeat", "version": 1, "locations": ("path",), "libraries": ("torch",)}
    stage = Stage(repeat, is_costly=is_costly, **arguments)
    key = stage.key(INPUTS)
    assert produce(stage, tmp_path)["made_with"] == {"torch": "2.8.0+cpu"}
    assert caplog.messages == []
    installed["torch"] = "2.8.1"
    assert stage.key(INPUTS) == key
    for _ in range(2):
        assert produce(stage, tmp_path)["made_with"] == {"torch": "2.8.0+cpu"}
    [remark] = caplog.messages
    assert "output of other versions is kept (torch 2.8.0+cpu, now 2.8.1)" in remark
    installed["torch"] = "2.9.0"
    assert (stage.key(INPUTS) == key) is is_costly


def test_many_stale_outputs_are_made_in_few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven outputs of which one exists, at most two tasks: three outputs each, and one is only read."""
    stage, groups = make(), []
    calls = [{"label": str(i), "after": ["target"], **INPUTS, "times": i} for i in range(7)]
    expected = [produce(stage, tmp_path / "other", {**INPUTS, "times": i}) for i in range(7)]
    produce(stage, tmp_path, {**INPUTS, "times": 2})

    def submit(group: list[dict], *, label: str, after: list) -> SimpleNamespace:
        groups.append((label, [arguments["inputs"]["times"] for arguments in group]))
        pointers = stage.produce_group(group, label=label, after=after)
        return SimpleNamespace(result=lambda timeout: pointers)

    monkeypatch.setattr(stage.group_task, "with_options", lambda **_: SimpleNamespace(submit=submit))
    monkeypatch.setattr(stages, "SHOWN_CACHED", 0)
    monkeypatch.setattr(stages, "MOST_TASKS", 2)
    monkeypatch.setattr(stages, "get_run_logger", lambda: logging.getLogger("test"))
    assert stage.map(tmp_path, calls) == expected
    assert groups == [("repeat 1 to 4 of 7", [0, 1, 3]), ("repeat 5 to 7 of 7", [4, 5, 6])]


def test_a_stage_that_two_flows_make_at_once_is_that_of_the_first(tmp_path: Path) -> None:
    """Both write the same stage; the slower one finds the other's outputs and leaves them as they are."""
    numbers = iter((1, 2))
    own = make()

    def counted(out: Path, **inputs: object) -> dict:
        number = next(numbers)
        if number == 1:
            assert produce(own, tmp_path)["number"] == 2
        (out / "text").write_text(str(number))
        return {"number": number}

    own.function = counted
    assert produce(own, tmp_path)["number"] == 2
    directory = own.directory(tmp_path, INPUTS)
    assert (directory / "text").read_text() == "2"
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_a_damaged_entry_and_a_refreshed_one_are_replaced(tmp_path: Path) -> None:
    directory = make().directory(tmp_path, INPUTS)
    produce(make(), tmp_path)
    (directory / "deep" / "text").unlink()
    produce(make(), tmp_path)
    assert (directory / "deep" / "text").exists()
    (directory / "deep" / "text").write_text("other")
    produce(make(), tmp_path, refresh=True)
    assert (directory / "deep" / "text").read_text() == "d1d1"


class Pickled:
    """Runs something where it is loaded."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def record_of(serializer: dict[str, Any], result: str) -> str:
    return json.dumps({"metadata": {"storage_key": "k", "serializer": serializer}, "result": result})


@pytest.mark.parametrize(
    "serializer",
    [
        {"type": "pickle", "picklelib": "cloudpickle"},
        {"type": "json", "object_decoder": "prefect.serializers.prefect_json_object_decoder"},
        {"type": "compressed/pickle"},
        {},
    ],
)
def test_prefect_opens_no_record_that_names_another_serializer(
    tmp_path: Path, serializer: dict[str, Any]
) -> None:
    """Prefect would execute a pickle, or import what the record names."""
    stage = make()
    produce(stage, tmp_path)
    records = tmp_path.resolve() / "prefect" / "storage"
    records.mkdir(parents=True)
    record = records / f"repeat-{stage.key(INPUTS)}"

    def is_read() -> bool:
        task = stage._configure(tmp_path, INPUTS, refresh=False, submitted=False)
        assert task.result_serializer == stages.RECORDS
        return not task.refresh_cache

    assert is_read()
    record.write_text(record_of(stages.RECORDS.model_dump(), "{}"))
    assert is_read()
    record.write_text(record_of(serializer, base64.b64encode(pickle.dumps(Pickled())).decode()))
    assert not is_read()
    for damaged in ("", "[1]", "[" * 100_000, "null"):
        record.write_text(damaged)
        assert not is_read()
