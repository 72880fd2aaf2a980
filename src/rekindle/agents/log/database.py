"""Opening the file of sessions: its tables, who may have it, and what becomes of a damaged one.

    session(number, namespace, id, created, last_use, num_events, progress, plan, preludes, mac)
                                              a row each; plan and preludes as JSON; `num_events` of `event`
    event(session, number, at, kind, body, mac)                         from 0 on, without a gap
    memory(namespace, agent, at, prelude, forgotten, mac)               of the last session that was deleted

A session's number is never given again. `forgotten`: what an agent has of sessions up to this number it brings into no
other one. `mac` and `progress`: `macs`. No table has an index: a row that does not verify may have any name, and takes
none from another; `inventory` knows the names. Format 3; a file of format 2 is taken over.

What SQLite cannot walk is a damaged file, set aside when it is opened: its pages are looked through each time. Rows
whose keys are out of order are put in order; a column of another type than its own is a damaged row, left as it is.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rekindle.agents.log.macs import SessionMacs
from rekindle.errors import StoreError
from rekindle.store import sqlite_file
from rekindle.store.row_macs import TableMac
from rekindle.store.sqlite_file import transaction

logger = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT = 3
_TAKEN_OVER = 2
_MARK = int.from_bytes(b"RKS", "big") << 8 | FORMAT  # the format once more, should its number be damaged
BUSY_S = 2.0  # that the process before may need to let go of the file
_MOST_MESSAGES = 100  # of a check: what is wrong with pages comes first
_DAMAGED_ROW = re.compile(r"\S+ value in \w+\.\w+")
_LARGEST = 1 << 53  # number of a session; beyond, SQLite runs out of them
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
_COPIES = {
    "session": "number, namespace, id, created, last_use, 0, x'', plan, preludes, x''",
    "event": "session, number, at, kind, body, x''",
    "memory": "namespace, agent, at, prelude, forgotten, x''",
}


def opened(path: Path | None, make: Callable[[sqlite3.Connection, SessionMacs], T]) -> T:
    """What `make` makes of the file at `path`, which no other process has until it is closed; None: in memory.

    A damaged one is set aside, also where `make` finds it so (sqlite3.DatabaseError). Raises StoreLocked, StoreError.
    """

    def prepared(connection: sqlite3.Connection, secret: bytes) -> T:
        macs = SessionMacs(secret)
        _check(connection, macs)
        _bring_up(connection, path, macs)
        _limit_numbers(connection)
        return make(connection, macs)

    return sqlite_file.opened(path, prepared, busy_s=BUSY_S, locking="exclusive")


def _check(connection: sqlite3.Connection, macs: SessionMacs) -> None:
    """Put tables in order again whose keys are not, as lookups miss rows there.

    Raises sqlite3.DatabaseError where the file is damaged beyond its rows.
    """
    found = _messages(connection)
    tables = [table for table in _TABLES if f"row not in PRIMARY KEY order for {table}" in found]
    if tables:
        logger.error("keys in the file of sessions are damaged (%s): rows are put in order again", ", ".join(tables))
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        known = {"event": macs.event, "memory": macs.memory} if version != _TAKEN_OVER else {}
        with transaction(connection):
            for table in tables:
                _sort(connection, table, known.get(table))
        found = _messages(connection)
    if found:
        raise sqlite3.DatabaseError(found[0])


def _messages(connection: sqlite3.Connection) -> list[str]:
    """What is wrong with the file, but for values that only their row's MAC has to refuse."""
    found = [message for (message,) in connection.execute(f"PRAGMA integrity_check({_MOST_MESSAGES})")]
    wrong = [message for message in found if message != "ok" and not _DAMAGED_ROW.fullmatch(message)]
    return found if len(found) == _MOST_MESSAGES else wrong


def _sort(connection: sqlite3.Connection, table: str, mac: TableMac | None) -> None:
    """Write a table anew, as far as it can be read; of rows with one key that which verifies stays."""
    (statement,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    connection.execute(statement)
    if mac is not None:
        for row in filter(mac.holds, connection.execute(f"SELECT * FROM old_{table}")):
            connection.execute(f"INSERT OR IGNORE INTO {table} VALUES(?, ?, ?, ?, ?, ?)", row)
    connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM old_{table}")
    connection.execute(f"DROP TABLE old_{table}")


def _bring_up(connection: sqlite3.Connection, path: Path | None, macs: SessionMacs) -> None:
    """Make the tables of a new file, or bring an older one up to this format, in one transaction."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (mark,) = connection.execute("PRAGMA application_id").fetchone()
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == FORMAT or mark == _MARK:
        if (version, mark) != (FORMAT, _MARK):
            logger.warning(
                "the number of the format of %s is damaged (%d, %d): it is written anew", path, version, mark
            )
            _stamp(connection)
    elif version in (0, _TAKEN_OVER):  # a full disk takes no transaction, and one is not needed to read
        with transaction(connection):
            if not tables:
                for statement in _TABLES.values():
                    connection.execute(statement)
            else:
                _take_over(connection, macs)
            _stamp(connection)
        if tables:
            _shorten(connection, path)
    else:
        raise StoreError(f"{path} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
    if not set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")) >= _SCHEMA:
        raise sqlite3.DatabaseError("its tables are not those of a file of sessions")


def _stamp(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute(f"PRAGMA application_id = {_MARK}")


def _take_over(connection: sqlite3.Connection, macs: SessionMacs) -> None:
    """Copy what a file of format 2 holds. Nothing vouches for it: what is in it now counts as what was written."""
    logger.info("the file of sessions becomes one of format %d, once", FORMAT)
    (last,) = connection.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'session'").fetchone()
    for table, statement in _TABLES.items():
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        connection.execute(statement)
        connection.execute(f"INSERT INTO {table} SELECT {_COPIES[table]} FROM old_{table}")
        connection.execute(f"DROP TABLE old_{table}")
    connection.execute("DELETE FROM sqlite_sequence")
    if last is not None:
        connection.execute("INSERT INTO sqlite_sequence VALUES('session', ?)", (last,))
    macs.vouch(connection)


def _shorten(connection: sqlite3.Connection, path: Path | None) -> None:
    """Give back the room of what was copied; it costs nothing but room if the disk has none for that."""
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        logger.warning("%s keeps the room that it had in its old format, new sessions use it: %s", path, error)


def _limit_numbers(connection: sqlite3.Connection) -> None:
    """Have new sessions get numbers, whatever became of the largest one."""
    small = f"typeof(seq) = 'integer' AND seq BETWEEN 0 AND {_LARGEST}"
    queries = f"SELECT 1 FROM sqlite_sequence WHERE NOT ({small})", f"SELECT 1 FROM session WHERE number > {_LARGEST}"
    if any(connection.execute(query).fetchone() for query in queries):
        logger.error("the largest number of a session is damaged: it is counted anew")
        connection.execute(f"UPDATE session SET number = -number WHERE number > {_LARGEST}")
        last = "(SELECT ifnull(max(number), 0) FROM session)"
        connection.execute(f"UPDATE sqlite_sequence SET seq = {last} WHERE NOT ({small})")
