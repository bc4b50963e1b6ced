"""Rank status files, and the one message that explains a failed run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.launch.rank_status import explain


def test_a_killed_rank_is_named_before_those_that_only_lost_it(tmp_path: Path, rank_record: Any) -> None:
    survivor, killed = rank_record(tmp_path, 0, "drafter"), rank_record(tmp_path, 1, "target")
    killed.phase("capture", step=7)
    survivor.phase("wait for target rank 1", step=7)
    survivor.report_error(RuntimeError("Connection closed by peer"))
    message = explain(tmp_path, 1)
    assert message.startswith("rank 1 (target, pid ")
    assert "phase 'capture' of step 7" in message


def test_an_error_report_names_rank_phase_and_cause(tmp_path: Path, rank_record: Any) -> None:
    record = rank_record(tmp_path, 2, "colocated")
    record.phase("save", step=12)
    record.report_error(OSError("No space left on device"))
    message = explain(tmp_path, 1)
    assert "rank 2 (colocated on " in message
    assert "phase 'save' of step 12: OSError: No space left on device" in message


def test_a_cause_is_named_before_the_connections_that_it_broke(tmp_path: Path, rank_record: Any) -> None:
    rank_record(tmp_path, 1, "target").report_error(RuntimeError("Connection closed by peer"))
    rank_record(tmp_path, 0, "drafter").report_error(OSError("No space left on device"))
    assert "rank 0 (drafter on" in explain(tmp_path, 1)


def test_a_rank_that_stopped_on_a_signal_explains_the_connections_it_closed(
    tmp_path: Path, rank_record: Any
) -> None:
    stopped = rank_record(tmp_path, 0, "drafter")
    stopped.phase("save", step=5)
    stopped.end("stopped")
    rank_record(tmp_path, 1, "target").report_error(RuntimeError("Connection closed by peer"))
    assert "stopped by a signal at step 5" in explain(tmp_path, 143)


def test_a_users_mistake_is_reported_without_the_rank(tmp_path: Path, rank_record: Any) -> None:
    rank_record(tmp_path, 0, "colocated")  # still running when the other failed
    rank_record(tmp_path, 1, "colocated").report_error(UserError("drafter.mask_token_id: not set"))
    assert explain(tmp_path, 1) == "drafter.mask_token_id: not set"


def test_no_rank_at_all(tmp_path: Path) -> None:
    assert "before any rank had started" in explain(tmp_path, 3)


def test_phases_count_seconds_and_are_visible_at_once(tmp_path: Path, rank_record: Any) -> None:
    record = rank_record(tmp_path, 0, "colocated")
    record.phase("capture", step=3, microbatch=1)
    shown = json.loads((tmp_path / "ranks" / "rank-0.json").read_text())
    assert (shown["phase"], shown["step"], shown["microbatch"], shown["pid"]) == (
        "capture",
        3,
        1,
        os.getpid(),
    )
    time.sleep(0.02)
    record.phase("train")
    seconds = record.take_seconds()
    assert seconds["capture"] >= 0.02
    assert record.take_seconds().keys() == {"train"}


def test_damaged_files_of_ranks_are_passed_over(tmp_path: Path, rank_record: Any) -> None:
    rank_record(tmp_path, 0, "colocated")
    for i, text in enumerate(["", "[]", "{}", '{"rank": "x"}', "[" * 100_000, "3"], 1):
        (tmp_path / "ranks" / f"rank-{i}.json").write_text(text)
        (tmp_path / "ranks" / f"rank-{i}.error.json").write_text(text)
    assert explain(tmp_path, 1).startswith("rank 0 (colocated, pid ")
