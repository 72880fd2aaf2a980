"""Opening the file of sessions: its tables, who may have it, and what becomes of a damaged one.

    session(number, namespace, id, created, last_use, plan, preludes)   a row each; plan and preludes as JSON
    event(session, number, at, kind, body)                              from 0 on, without a gap
    memory(namespace, agent, at, prelude, forgotten)                    of the last session that was deleted

A session's number is never given again. `forgotten`: what an agent has of sessions up to this number it brings into no
other one. Text that is no UTF-8 raises ValueError where it is read, like any other row that says nothing.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

from rekindle.errors import StoreError, StoreLocked
from rekindle.store.refusal import refusal

logger = logging.getLogger(__name__)
FORMAT = 2
BUSY_S = 2.0  # that the process before may need to let go of the file
_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS session(
    number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL,
    last_use REAL NOT NULL, plan TEXT NOT NULL, preludes TEXT NOT NULL, UNIQUE(namespace, id));
CREATE TABLE IF NOT EXISTS event(
    session INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY(session, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS memory(
    namespace TEXT NOT NULL, agent TEXT NOT NULL, at REAL NOT NULL, prelude TEXT, forgotten INTEGER NOT NULL,
    PRIMARY KEY(namespace, agent)) WITHOUT ROWID;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


def opened(path: Path | None) -> sqlite3.Connection:
    """The file at `path`, made where there is none, for its owner alone; None: in memory.

    A damaged one is set aside, loudly. Raises StoreLocked while another process has it, StoreError if it cannot be
    used, StoreRefused where that is the disk's doing.
    """
    if path is None:
        return _connection(":memory:")
    is_there = path.parent.is_dir()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        message = f"{path} cannot be used: {error.strerror or error}; check its permissions"
        raise (refusal(error, message) if is_there else StoreError(message)) from error
    try:
        return _connection(str(path))
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            message = f"{path} is in use by another process: stop it first, or choose another --store"
            raise StoreLocked(message) from error
        raise refusal(error, f"{path} cannot be opened: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # what SQLite says may quote what is damaged
        _set_aside(path, error)
        return _connection(str(path))


def _connection(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes.decode
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = FULL",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            "secure_delete = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN EXCLUSIVE")  # taken now and kept, not when something is written first
        connection.execute("COMMIT")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise StoreError(f"{name} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        if version != FORMAT:  # a full disk takes no transaction, and one is not needed to read
            connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_aside(path: Path, error: Exception) -> None:
    """Rename a damaged file, which may be somebody's only copy of what was said, over no other one."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in range(1000))
    aside = next(name for name in names if not name.exists())
    logger.error("%s is damaged (%s): it is now %s, and a new one begins without sessions", path, error, aside.name)
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
