"""The cache of answers: what is damaged is named, or asked for again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from dflash_core.data.answers import Answer, AnswerCache
from dflash_core.errors import UserError

ANSWER = Answer({"role": "assistant", "content": "yes"}, "stop", 2, [5, 6])


def test_an_answer_comes_back_and_a_damaged_one_is_asked_for_again(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.sqlite")
    cache.put("a", ANSWER)
    assert cache.get("a") == ANSWER
    with sqlite3.connect(tmp_path / "answers.sqlite") as database:
        database.execute("UPDATE answers SET answer = '{\"mess'")
    database.close()
    assert cache.get("a") is None
    cache.put("a", ANSWER)
    assert cache.get("a") == ANSWER
    cache.close()


def test_a_damaged_database_is_named_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "answers.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(UserError, match=r"answers\.sqlite cannot be used: .*restore it from a copy"):
        AnswerCache(tmp_path / "answers.sqlite")


def test_a_full_disk_is_named_with_the_next_step(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.sqlite")
    # SQLite reports its limit of pages as it does a full disk.
    cache._database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(UserError, match="full; free space on its disk and run the same command again"):
        cache.put("a", Answer({"content": "x" * 100_000}, "stop", 1))
    cache.close()
