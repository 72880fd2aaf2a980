"""The session file: its rows, exclusive access, and recovery from damage.

    session    a row per session; plan, preludes: JSON; `num_events` rows of `event`
    event      numbered from 0 in each session, without gaps
    memory     what permanent agents remember of the last session that was deleted

Session numbers are never reused. A session's row has two MACs: `mac` over its identity and setup, and `progress` over
what changes with each event, so that an event rehashes only three numbers. `progress` includes the number of events,
so truncation is detected as well as gaps. A MAC does not prove that a row is the newest version: a stale page in place
of the current one is detected only if its rows no longer fit those of other pages. No table has an index, so a damaged
row does not block the name that it holds; `inventory` tracks the names.

A file that fails SQLite's integrity check, run at each open, is damaged and set aside. Rows with keys out of order are
sorted again; a value of the wrong column type makes a damaged row, which is left unchanged.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from rekindle.errors import StoreError
from rekindle.store.files import sqlite_file
from rekindle.store.files.keys import NOTHING_GIVEN, Given, StoreKeys
from rekindle.store.files.sqlite_file import erase_traces_left, schema_of, transaction, version_of
from rekindle.store.files.table import KeyedTable, Table, row_key
from rekindle.store.files.veil import Veil

logger = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT = 3
_MARK = int.from_bytes(b"RKS", "big") << 8 | FORMAT  # the format again, in case its number is damaged
BUSY_S = 2.0  # time for the previous process to close the file
_MOST_MESSAGES = 100  # of a check, which reports damaged pages first
_DAMAGED_ROW = re.compile(r"\S+ value in \w+\.\w+")
_LARGEST = 1 << 53  # session number; above it, SQLite could run out of them


class SessionRow(NamedTuple):
    """A session."""

    number: Annotated[int, "INTEGER PRIMARY KEY AUTOINCREMENT"]
    namespace: str
    id: str
    created: float
    last_use: float
    num_events: int
    progress: bytes
    plan: str
    preludes: str
    mac: bytes = b""


class ProgressRow(NamedTuple):
    """What of a session changes with each event."""

    number: int
    last_use: float
    num_events: int
    progress: bytes = b""


class EventRow(NamedTuple):
    """An event of a session."""

    session: int
    number: int
    at: float
    kind: str
    body: str
    mac: bytes = b""


class MemoryRow(NamedTuple):
    """What an agent remembers until `at`; it brings nothing from sessions up to `forgotten` into others."""

    namespace: str
    agent: str
    at: float
    prelude: str | None
    forgotten: int
    mac: bytes = b""


_SET_UP = ("number", "namespace", "id", "created", "plan", "preludes")
SESSION = Table(
    "session", SessionRow, options="", covered=_SET_UP, sealed=("plan", "preludes"), matched=("namespace", "id")
)
PROGRESS = Table("session", ProgressRow, mac_name="progress")
EVENT = Table("event", EventRow, "PRIMARY KEY(session, number)", sealed=("kind", "body"))
MEMORY = Table(
    "memory", MemoryRow, "PRIMARY KEY(namespace, agent)", sealed=("prelude",), matched=("namespace", "agent")
)
TABLES: tuple[Table[Any], ...] = (SESSION, EVENT, MEMORY)
_SCHEMA = {table.described for table in TABLES}
_SCHEMA |= {("table", "sqlite_sequence", "sqlite_sequence", "CREATETABLEsqlite_sequence(name,seq)")}


class SessionTables:
    """The tables of one file, under the keys in its directory."""

    def __init__(self, keys: StoreKeys) -> None:
        key, veil = row_key(keys.secret, "sessions"), Veil.of(keys, "sessions")
        self.session = KeyedTable(SESSION, key, veil)
        self.progress = KeyedTable(PROGRESS, key)
        self.event = KeyedTable(EVENT, key, veil)
        self.memory = KeyedTable(MEMORY, key, veil)


def opened(
    path: Path | None, make: Callable[[sqlite3.Connection, SessionTables], T], *, given: Given = NOTHING_GIVEN
) -> T:
    """Open the file at `path` (None: in memory) with exclusive access and return what `make` returns.

    A damaged file is set aside, also when `make` raises sqlite3.DatabaseError. `given`: what the keys next to it are
    made from or opened with. Raises StoreLocked, StoreError.
    """

    def prepared(connection: sqlite3.Connection, keys: StoreKeys) -> T:
        tables = SessionTables(keys)
        _check(connection, tables)
        _bring_up(connection, path)
        _limit_numbers(connection)
        erase_traces_left(connection, path)
        return make(connection, tables)

    return sqlite_file.opened(path, prepared, busy_s=BUSY_S, locking="exclusive", given=given)


def _check(connection: sqlite3.Connection, tables: SessionTables) -> None:
    """Sort tables again whose keys are out of order, since lookups would miss rows there.

    Raises sqlite3.DatabaseError if the damage goes beyond rows.
    """
    found = _messages(connection)
    keyed: tuple[KeyedTable[Any], ...] = (tables.event, tables.memory)  # those without row ids
    unsorted = [table for table in keyed if f"row not in PRIMARY KEY order for {table.name}" in found]
    if unsorted:
        names = ", ".join(table.name for table in unsorted)
        logger.error("keys in the session file are damaged (%s): sorting the rows again", names)
        with transaction(connection):
            for table in unsorted:
                _sort(connection, table)
        found = _messages(connection)
    if found:
        raise sqlite3.DatabaseError(found[0])


def _messages(connection: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the file, except for values of a wrong type, which their row's MAC rejects."""
    found = [message for (message,) in connection.execute(f"PRAGMA integrity_check({_MOST_MESSAGES})")]
    wrong = [message for message in found if message != "ok" and not _DAMAGED_ROW.fullmatch(message)]
    return found if len(found) == _MOST_MESSAGES else wrong


def _sort(connection: sqlite3.Connection, table: KeyedTable[Any]) -> None:
    """Rewrite a table as far as it can be read; among rows with the same key, one that verifies wins."""
    name = table.name
    (statement,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    connection.execute(statement)
    for row in filter(table.holds, map(table.opened, connection.execute(f"SELECT * FROM old_{name}"))):
        table.insert(connection, row, instead="INSERT OR IGNORE")
    connection.execute(f"INSERT OR IGNORE INTO {name} SELECT * FROM old_{name}")
    connection.execute(f"DROP TABLE old_{name}")


def _bring_up(connection: sqlite3.Connection, path: Path | None) -> None:
    """Create the tables of a new file in one transaction; StoreError for a file of another format."""
    version, tables = version_of(connection)
    (mark,) = connection.execute("PRAGMA application_id").fetchone()
    if version == FORMAT or mark == _MARK:
        if (version, mark) != (FORMAT, _MARK):
            logger.warning("the format number of %s is damaged (%d, %d): rewriting it", path, version, mark)
            _stamp(connection)
    elif version == 0 and not tables:  # not for a current file: a full disk allows no transaction
        with transaction(connection):
            for table in TABLES:
                connection.execute(table.create)
            _stamp(connection)
    else:
        raise StoreError(f"{path} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
    if not schema_of(connection) >= _SCHEMA:
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
