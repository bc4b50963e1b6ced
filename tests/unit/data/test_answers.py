"""The file of regenerated answers: what was stored comes back, and a foreign file is one message."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from dflash_core.data.answers import SCHEMA, Answer, AnswerCache
from dflash_core.errors import UserError

ANSWER = Answer({"role": "assistant", "content": "a"}, "stop", 1, [3])


def execute(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def test_answers_come_back(tmp_path: Path) -> None:
    for _ in range(2):
        cache = AnswerCache(tmp_path / "answers.sqlite")
        cache.put("k", ANSWER)
        assert cache.get("k") == ANSWER
        assert cache.get("other") is None
        cache.close()


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE answers (key TEXT, answer TEXT, more TEXT)"],
        ["CREATE VIEW answers AS SELECT 'k' AS key, load_extension('/tmp/evil.so') AS answer"],
        [SCHEMA, "CREATE TRIGGER t AFTER INSERT ON answers BEGIN DELETE FROM answers; END"],
        [SCHEMA, "CREATE TABLE other (a)"],
        ["CREATE TABLE answers (key TEXT, answer TEXT AS (hex(zeroblob(1000000000))))"],
    ],
    ids=["columns", "view", "trigger", "table", "generated"],
)
def test_a_foreign_schema_is_rejected(tmp_path: Path, statements: list[str]) -> None:
    execute(tmp_path / "answers.sqlite", *statements)
    with pytest.raises(UserError, match="cannot be used: it is no store of answers, it holds"):
        AnswerCache(tmp_path / "answers.sqlite")


@pytest.mark.parametrize("content", [b"no database" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answers.sqlite").write_bytes(content)
    with pytest.raises(UserError, match=r"answers\.sqlite cannot be used: .*restore it from a copy"):
        AnswerCache(tmp_path / "answers.sqlite")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "{}",
        "3",
        json.dumps({"message": 3, "finish_reason": "stop", "num_tokens": 1}),
        json.dumps({"message": {"role": "system", "content": "a"}, "finish_reason": "stop", "num_tokens": 1}),
        json.dumps({"message": ANSWER.message, "finish_reason": "stop", "num_tokens": 1, "token_ids": ["a"]}),
    ],
)
def test_a_value_that_is_no_answer_is_asked_for_again(tmp_path: Path, text: str) -> None:
    execute(tmp_path / "answers.sqlite", SCHEMA, f"INSERT INTO answers VALUES ('k', '{text}')")
    cache = AnswerCache(tmp_path / "answers.sqlite")
    assert cache.get("k") is None
    cache.put("k", ANSWER)
    assert cache.get("k") == ANSWER
    cache.close()


def test_a_value_over_the_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_core.data.answers.MAX_ANSWER_BYTES", 100_000)
    execute(
        tmp_path / "answers.sqlite", SCHEMA, "INSERT INTO answers VALUES ('k', printf('%.*c', 1000000, 'a'))"
    )
    cache = AnswerCache(tmp_path / "answers.sqlite")
    with pytest.raises(UserError, match="too big"):
        cache.get("k")
    cache.close()


def test_a_full_disk_is_named_with_the_next_step(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.sqlite")
    # SQLite reports its limit of pages as it does a full disk.
    cache._database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(UserError, match="full; free space on its disk and run the same command again"):
        cache.put("a", Answer({"content": "x" * 100_000}, "stop", 1))
    cache.close()
