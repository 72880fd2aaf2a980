"""The file of kept responses: its tables, how a response is packed, and which go first.

    response(number, namespace, id, agent, previous, depth, last_use, num_bytes)    a row each, small
    content(number, packed)                                                        what it says
    item(namespace, id, number)                                                    which response holds an item

Whoever goes on from a response uses all of its chain, so a chain's rows share one `last_use`; of equal ones the
deepest goes first. So no response outlives one that it goes on from, unless somebody deletes that. One lock over one
connection; every method may be called from any thread and raises StoreError if the disk refuses.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import StoreError
from rekindle.server.responses.items import Item
from rekindle.store.transactions import Transactions

logger = logging.getLogger("rekindle.server")
FORMAT = 1
LEVEL = 1  # of compression: text shrinks to a quarter for a few milliseconds a megabyte
BUSY_S = 10.0  # that another process may have the file
_SCHEMA = """
CREATE TABLE IF NOT EXISTS response(
    number INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, agent TEXT, previous TEXT,
    depth INTEGER NOT NULL, last_use REAL NOT NULL, num_bytes INTEGER NOT NULL, UNIQUE(namespace, id));
CREATE INDEX IF NOT EXISTS response_agent ON response(namespace, agent);
CREATE INDEX IF NOT EXISTS response_use ON response(last_use, depth);
CREATE TABLE IF NOT EXISTS content(number INTEGER PRIMARY KEY, packed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS item(
    namespace TEXT NOT NULL, id TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY(namespace, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS item_number ON item(number);
"""
_USE_CHAIN = """
WITH RECURSIVE chain(id) AS (
    SELECT :id UNION
    SELECT previous FROM response JOIN chain USING(id) WHERE namespace = :namespace AND previous IS NOT NULL)
UPDATE response SET last_use = max(last_use, :now) WHERE namespace = :namespace AND id IN (SELECT id FROM chain)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A response to be written: whose it is, what it went on from, the ids of its items, and all of it packed."""

    namespace: str
    id: str
    agent: str | None
    previous: str | None
    items: tuple[str, ...]
    content: bytes

    @classmethod
    def packed(cls, namespace: str, agent: str | None, response: dict[str, Any], items: Sequence[Item]) -> Entry:
        """Pack a response and the items of its request; RecursionError where it is nested too deeply."""
        content = zlib.compress(json.dumps([response, list(items)], separators=(",", ":")).encode(), LEVEL)
        ids = tuple(item["id"] for item in (*items, *response["output"]))
        return cls(namespace, response["id"], agent, response["previous_response_id"], ids, content)


def open_records(path: Path | None, *, max_kept: int, max_bytes: int, kept_s: float) -> Records:
    """The file at `path`, made where there is none, for its owner alone; a damaged one is set aside.

    None: in memory. StoreError if it cannot be used.
    """
    if path is None:
        return Records(_connection(":memory:"), max_kept=max_kept, max_bytes=max_bytes, kept_s=kept_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # with reuse off, nobody else makes it
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        message = f"{path} cannot be used: {error.strerror or error}; check its permissions, or choose another --store"
        raise StoreError(message) from error
    try:
        return Records(_connection(str(path)), max_kept=max_kept, max_bytes=max_bytes, kept_s=kept_s)
    except sqlite3.OperationalError as error:
        raise StoreError(f"{path} cannot be opened: {error}") from error
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.damaged")
        logger.warning("%s is damaged (%s): it is now %s, and a new one begins", path, error, aside.name)
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    return open_records(path, max_kept=max_kept, max_bytes=max_bytes, kept_s=kept_s)


def _connection(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise StoreError(f"{name} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
        connection.executescript(_SCHEMA + f"PRAGMA user_version = {FORMAT};")
    except BaseException:
        connection.close()
        raise
    return connection


class Records(Transactions):
    """The open file. Bounds: responses, their packed bytes, and seconds since a response was last used."""

    def __init__(self, connection: sqlite3.Connection, *, max_kept: int, max_bytes: int, kept_s: float) -> None:
        super().__init__(connection, "kept responses", damage=(zlib.error, ValueError))
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._kept_s = kept_s

    def find(self, namespace: str, id: str, *, now: float) -> tuple[str | None, dict[str, Any], list[Item]] | None:
        """Agent, response and items of an id; None where there is none, or it is too old."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT agent, packed FROM response JOIN content USING(number) "
                "WHERE namespace = ? AND id = ? AND last_use >= ?",
                (namespace, id, now - self._kept_s),
            ).fetchone()
            if row is None:
                return None
            response, items = json.loads(zlib.decompress(row[1]))
            return row[0], response, items

    def holder(self, namespace: str, item: str) -> str | None:
        """The response that holds an item; None where none does."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT response.id FROM item JOIN response USING(number) WHERE item.namespace = ? AND item.id = ?",
                (namespace, item),
            ).fetchone()
            return None if row is None else str(row[0])

    def save(self, entries: Sequence[Entry], now: float) -> None:
        """Write responses in the order they came, and let go of what is too much; all of it or nothing."""
        with self._writing() as connection:
            for entry in entries:
                self._insert(connection, entry, now)
            self._make_room(connection, now)

    @staticmethod
    def _insert(connection: sqlite3.Connection, entry: Entry, now: float) -> None:
        above = connection.execute(
            "SELECT depth FROM response WHERE namespace = ? AND id = ?", (entry.namespace, entry.previous)
        ).fetchone()
        depth = above[0] + 1 if above else 0
        row = (entry.namespace, entry.id, entry.agent, entry.previous, depth, now, len(entry.content))
        number = connection.execute(
            "INSERT INTO response(namespace, id, agent, previous, depth, last_use, num_bytes) VALUES(?,?,?,?,?,?,?)",
            row,
        ).lastrowid
        connection.execute("INSERT INTO content VALUES(?, ?)", (number, entry.content))
        items = [(entry.namespace, item, number) for item in entry.items]
        connection.executemany("INSERT OR IGNORE INTO item VALUES(?, ?, ?)", items)
        if entry.previous is not None:
            chain = {"namespace": entry.namespace, "id": entry.previous, "now": now}
            connection.execute(_USE_CHAIN, chain)

    def _make_room(self, connection: sqlite3.Connection, now: float) -> None:
        old = connection.execute("SELECT number FROM response WHERE last_use < ?", (now - self._kept_s,))
        gone = [number for (number,) in old]
        num_kept, num_bytes = connection.execute("SELECT count(*), total(num_bytes) FROM response").fetchone()
        order = "SELECT number, num_bytes FROM response ORDER BY last_use, depth DESC, number DESC"
        for at, (number, size) in enumerate(connection.execute(order)):
            if at >= len(gone) and num_kept <= self._max_kept and num_bytes <= self._max_bytes:
                break
            if at >= len(gone):
                gone.append(number)
            num_kept, num_bytes = num_kept - 1, num_bytes - size
        self._delete(connection, gone)

    @staticmethod
    def _delete(connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
        for table in ("response", "content", "item"):
            connection.executemany(f"DELETE FROM {table} WHERE number = ?", [(number,) for number in numbers])

    def delete(self, namespace: str, id: str) -> bool:
        """Delete one response; whether there was one."""
        with self._writing() as connection:
            rows = connection.execute("SELECT number FROM response WHERE namespace = ? AND id = ?", (namespace, id))
            numbers = [number for (number,) in rows]
            self._delete(connection, numbers)
            return bool(numbers)

    def forget(self, namespace: str, agent: str) -> int:
        """Delete an agent's responses and rewrite the file: moved cells leave copies in it that no deletion finds."""
        with self._writing() as connection:
            rows = connection.execute(
                "SELECT number FROM response WHERE namespace = ? AND agent = ?", (namespace, agent)
            )
            numbers = [number for (number,) in rows]
            self._delete(connection, numbers)
        if numbers:
            with self._reading() as connection:
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return len(numbers)

    def check(self) -> None:
        """Assert that every row has its content and its depth, and that there are no more than there may be."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT number, namespace, id, previous, depth, last_use FROM response"
            ).fetchall()
            assert len(rows) <= self._max_kept, len(rows)
            numbers = {row[0] for row in rows}
            for table in ("content", "item"):
                strange = {n for (n,) in connection.execute(f"SELECT number FROM {table}")} - numbers
                assert not strange, (table, strange)
            assert {n for (n,) in connection.execute("SELECT number FROM content")} == numbers
            above = {(row[1], row[2]): row for row in rows}
            for row in rows:
                parent = above.get((row[1], row[3]))
                assert parent is None or (parent[4] < row[4] and parent[5] >= row[5]), (row, parent)
