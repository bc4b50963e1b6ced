"""Notes of live flow runs, and what dead processes have left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dflash_core import files
from dflash_core.files import temporary_name
from tasks.storage.live_runs import live_note, live_runs, remove_all_leftovers

WRITE = """
import sys
from pathlib import Path
from dflash_core.files import temporary_name
for path in sys.argv[1:]:
    temporary = temporary_name(Path(path))
    temporary.mkdir() if path.endswith("directory") else temporary.touch()
"""


def test_a_note_lasts_as_long_as_its_flow(tmp_path: Path) -> None:
    with live_note(tmp_path, "a", "train-dflash"), live_note(tmp_path, "b", "rebucket"):
        descriptions = [run.description for run in live_runs(tmp_path, besides="b")]
        assert [text.split(",")[0] for text in descriptions] == ["train-dflash"]
        note = json.loads((tmp_path / "live" / "a.json").read_text())
        # The same pid, of a process that started at another time.
        (tmp_path / "live" / "a.json").write_text(json.dumps(note | {"started": "before"}))
        (tmp_path / "live" / "c.json").write_text(json.dumps(note | {"started": "before", "host": "other"}))
        assert [run.note.stem for run in live_runs(tmp_path)] == ["b", "c"]
        assert not (tmp_path / "live" / "a.json").exists()
    assert [run.note.stem for run in live_runs(tmp_path)] == ["c"]


def test_what_dead_processes_have_left_is_removed(tmp_path: Path, monkeypatch) -> None:
    entry, run = tmp_path / "store" / "plan" / "key", tmp_path / "quickstart" / "run"
    for directory in (entry, run / "captures"):
        directory.mkdir(parents=True)
    left = [run / "run.json", run / "drafter-directory", entry, run.parent / "latest", run / "captures" / "a"]
    subprocess.run([sys.executable, "-c", WRITE, *map(str, left)], check=True, cwd=Path(__file__).parents[4])
    mine = temporary_name(run / "run.json")
    mine.touch()
    monkeypatch.setattr(files.socket, "gethostname", lambda: "another-machine")
    assert not files.remove_leftovers(run)
    monkeypatch.undo()
    remove_all_leftovers(tmp_path)
    assert list(tmp_path.rglob(".*")) == [mine]
