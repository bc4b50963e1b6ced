"""Damaged, locked and read-only databases end in one message that names the file and the next step."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_core.databases import check_database
from dflash_core.errors import UserError


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database of some pages."""
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE numbers (n TEXT)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [("x" * 500,)] * 100)
    connection.close()
    return path


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [garbage, half, directory])
def test_damage_is_named_with_the_remedy(database: Path, damage: Callable[[Path], None]) -> None:
    check_database(database, "restore it")
    damage(database)
    with pytest.raises(UserError, match=r"a\.db cannot be used: .*; restore it$"):
        check_database(database, "restore it")


def test_absent_and_empty_files_are_new_databases(tmp_path: Path) -> None:
    check_database(tmp_path / "none.db", "restore it")
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "empty.db").touch()
    check_database(tmp_path / "empty.db", "restore it")


def test_a_lock_of_another_process_is_named(database: Path) -> None:
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="locked; another process holds it; stop that process"):
        check_database(database, "restore it", lock_seconds=0.01)
    holder.close()
    check_database(database, "restore it")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_database_of_another_user_is_named(database: Path) -> None:
    database.chmod(0o400)
    with pytest.raises(UserError, match="cannot be written by this user"):
        check_database(database, "restore it")
