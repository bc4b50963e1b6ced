"""SQLite databases under the storage root: checked before use, so that damage ends in one message."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import UserError

# Prefect and MLflow hold a lock for milliseconds.
LOCK_SECONDS = 30.0


def check_database(path: Path, remedy: str, *, lock_seconds: float = LOCK_SECONDS) -> None:
    """Check that a database is whole, as far as its first pages tell, and can be written; absent is allowed.

    A file of no bytes is a new database. Costs milliseconds at any size: SQLite compares the size that the
    first page records with that of the file.

    Args:
        path: the file.
        remedy: the next step where it is damaged, and what is lost by it.
        lock_seconds: time to wait for another process.

    Raises:
        UserError: it is damaged, locked, or cannot be written.
    """
    if not os.path.lexists(path):
        return
    if path.is_file() and not (os.access(path, os.R_OK | os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UserError(
            f"{path} cannot be written by this user; allowed: a database that belongs to the user who runs "
            "the flows, in a directory that can be written (chown, chmod)"
        )
    with database_errors(path, remedy), contextlib.closing(sqlite3.connect(path, timeout=lock_seconds)) as db:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")


@contextlib.contextmanager
def database_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turn SQLite's errors inside the block into one message with the next step.

    Args:
        path: the file.
        remedy: the next step where the database is damaged, and what is lost by it.

    Raises:
        UserError: instead of a `sqlite3.Error`.
    """
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "locked" in text:
            remedy = "another process holds it; stop that process (`fuser` names it) or wait for it"
        elif "full" in text or "disk I/O" in text:
            remedy = "free space on its disk and run the same command again"
        elif "readonly" in text:
            remedy = "allowed: a database that the user who runs the flows can write"
        raise UserError(f"the database {path} cannot be used: {text}; {remedy}") from error
