"""Open the session file: tables, exclusive access, and recovery from damage.

    session(number, namespace, id, created, last_use, num_events, progress, plan, preludes, mac)
                                              a row per session; plan, preludes: JSON; `num_events` rows of `event`
    event(session, number, at, kind, body, mac)                         numbered from 0, without gaps
    memory(namespace, agent, at, prelude, forgotten, mac)               from the last session that was deleted

Session numbers are never reused. `forgotten`: an agent brings nothing from sessions up to this number into others.
`mac` and `progress`: see `macs`. No table has an index, so a damaged row does not block the name that it holds;
`inventory` tracks the names.

A file that fails SQLite's integrity check, run at each open, is damaged and set aside. Rows with keys out of order are
sorted again; a value of the wrong column type makes a damaged row, which is left unchanged.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rekindle.errors import StoreError
from rekindle.store import sqlite_file
from rekindle.store.row_macs import TableMac
from rekindle.store.sqlite_file import transaction
from rekindle_sessions.log.macs import SessionMacs

logger = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT = 3
_MARK = int.from_bytes(b"RKS", "big") << 8 | FORMAT  # the format again, in case its number is damaged
BUSY_S = 2.0  # time for the previous process to close the file
_MOST_MESSAGES = 100  # of a check, which reports damaged pages first
_DAMAGED_ROW = re.compile(r"\S+ value in \w+\.\w+")
_LARGEST = 1 << 53  # session number; above it, SQLite could run out of them
_TABLES = {
    "session": "CREATE TABLE session(number INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, "
    "id TEXT NOT NULL, created REAL NOT NULL, last_use REAL NOT NULL, num_events INTEGER NOT NULL, "
    "progress BLOB NOT NULL, plan TEXT NOT NULL, preludes TEXT NOT NULL, mac BLOB NOT NULL)",
    "event": "CREATE TABLE event(session INTEGER NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, "
    "kind TEXT NOT NULL, body TEXT NOT NULL, mac BLOB NOT NULL, PRIMARY KEY(session, number)) WITHOUT ROWID",
    "memory": "CREATE TABLE memory(namespace TEXT NOT NULL, agent TEXT NOT NULL, at REAL NOT NULL, prelude TEXT, "
    "forgotten INTEGER NOT NULL, mac BLOB NOT NULL, PRIMARY KEY(namespace, agent)) WITHOUT ROWID",
}
_SCHEMA = {("table", name, name, sql) for name, sql in _TABLES.items()}
_SCHEMA |= {("table", "sqlite_sequence", "sqlite_sequence", "CREATE TABLE sqlite_sequence(name,seq)")}


def opened(path: Path | None, make: Callable[[sqlite3.Connection, SessionMacs], T], *, secret: str | None = None) -> T:
    """Open the file at `path` (None: in memory) with exclusive access and return what `make` returns.

    A damaged file is set aside, also when `make` raises sqlite3.DatabaseError. `secret`: what a new secret next to it
    is made from. Raises StoreLocked, StoreError.
    """

    def prepared(connection: sqlite3.Connection, key: bytes) -> T:
        macs = SessionMacs(key)
        _check(connection, macs)
        _bring_up(connection, path)
        _limit_numbers(connection)
        return make(connection, macs)

    return sqlite_file.opened(path, prepared, busy_s=BUSY_S, locking="exclusive", secret=secret)


def _check(connection: sqlite3.Connection, macs: SessionMacs) -> None:
    """Sort tables again whose keys are out of order, since lookups would miss rows there.

    Raises sqlite3.DatabaseError if the damage goes beyond rows.
    """
    found = _messages(connection)
    tables = [table for table in _TABLES if f"row not in PRIMARY KEY order for {table}" in found]
    if tables:
        logger.error("keys in the session file are damaged (%s): sorting the rows again", ", ".join(tables))
        known = {"event": macs.event, "memory": macs.memory}
        with transaction(connection):
            for table in tables:
                _sort(connection, table, known.get(table))
        found = _messages(connection)
    if found:
        raise sqlite3.DatabaseError(found[0])


def _messages(connection: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the file, except for values of a wrong type, which their row's MAC rejects."""
    found = [message for (message,) in connection.execute(f"PRAGMA integrity_check({_MOST_MESSAGES})")]
    wrong = [message for message in found if message != "ok" and not _DAMAGED_ROW.fullmatch(message)]
    return found if len(found) == _MOST_MESSAGES else wrong


def _sort(connection: sqlite3.Connection, table: str, mac: TableMac | None) -> None:
    """Rewrite a table as far as it can be read; among rows with the same key, one that verifies wins."""
    (statement,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    connection.execute(statement)
    if mac is not None:
        for row in filter(mac.holds, connection.execute(f"SELECT * FROM old_{table}")):
            connection.execute(f"INSERT OR IGNORE INTO {table} VALUES(?, ?, ?, ?, ?, ?)", row)
    connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM old_{table}")
    connection.execute(f"DROP TABLE old_{table}")


def _bring_up(connection: sqlite3.Connection, path: Path | None) -> None:
    """Create the tables of a new file in one transaction; StoreError for a file of another format."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (mark,) = connection.execute("PRAGMA application_id").fetchone()
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == FORMAT or mark == _MARK:
        if (version, mark) != (FORMAT, _MARK):
            logger.warning("the format number of %s is damaged (%d, %d): rewriting it", path, version, mark)
            _stamp(connection)
    elif version == 0 and not tables:  # not for a current file: a full disk allows no transaction
        with transaction(connection):
            for statement in _TABLES.values():
                connection.execute(statement)
            _stamp(connection)
    else:
        raise StoreError(f"{path} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
    if not set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")) >= _SCHEMA:
        raise sqlite3.DatabaseError("its tables are not those of a session file")


def _stamp(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute(f"PRAGMA application_id = {_MARK}")


def _limit_numbers(connection: sqlite3.Connection) -> None:
    """Ensure that new sessions can get numbers even if the largest number is damaged."""
    small = f"typeof(seq) = 'integer' AND seq BETWEEN 0 AND {_LARGEST}"
    queries = f"SELECT 1 FROM sqlite_sequence WHERE NOT ({small})", f"SELECT 1 FROM session WHERE number > {_LARGEST}"
    if any(connection.execute(query).fetchone() for query in queries):
        logger.error("the largest session number is damaged: recounting it")
        connection.execute(f"UPDATE session SET number = -number WHERE number > {_LARGEST}")
        last = "(SELECT ifnull(max(number), 0) FROM session)"
        connection.execute(f"UPDATE sqlite_sequence SET seq = {last} WHERE NOT ({small})")
