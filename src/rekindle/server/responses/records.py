"""The file of stored responses and receipts: how a response is packed, and which are deleted first.

Continuing a response uses its whole chain, so a chain's rows share one `last_use`; among equal ones the deepest is
deleted first. So no response outlives the one it continues, unless a caller deletes that one. One lock over one
connection; every method may be called from any thread and raises StoreError if the disk refuses.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rekindle.errors import StoreError
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.item_fields import Item
from rekindle.server.responses.receipt_rows import MAX_RECEIPTS, NUM_BYTES
from rekindle.server.responses.tables import (
    INDEXES,
    TABLES,
    ContentRow,
    ResponseRow,
    ResponseTables,
    delete_all,
    drop_strays,
)
from rekindle.store.files.damage import kind_of
from rekindle.store.files.keys import NOTHING_GIVEN, Given, StoreKeys
from rekindle.store.files.sqlite_file import (
    SqliteFile,
    create,
    erase_traces,
    erase_traces_left,
    note_traces,
    opened,
    problem,
    schema_of,
    transaction,
    version_of,
)

logger = logging.getLogger("rekindle.server")
T = TypeVar("T")
FORMAT = 3
QUICKLY_CHECKED_BYTES = 64 << 20  # SQLite checks this much in a tenth of a second
LEVEL = 1  # of compression: text shrinks to a quarter for a few milliseconds a megabyte
BUSY_S = 10.0  # longest wait for another process that holds the file


_NUM_BYTES = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
_USE_CHAIN = """
WITH RECURSIVE chain(id) AS (
    SELECT :id UNION
    SELECT previous FROM response JOIN chain USING(id) WHERE namespace = :namespace AND previous IS NOT NULL)
UPDATE response SET last_use = max(last_use, :now) WHERE namespace = :namespace AND id IN (SELECT id FROM chain)
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A response to write: its owner, the response it continues, the ids of its items, and its packed content."""

    namespace: str
    id: str
    agent: str | None
    previous: str | None
    items: tuple[str, ...]
    content: bytes

    @classmethod
    def packed(cls, namespace: str, agent: str | None, response: dict[str, Any], items: Sequence[Item]) -> Entry:
        """Pack a response and the items of its request; RecursionError if it is nested too deeply."""
        content = zlib.compress(json.dumps([response, list(items)], separators=(",", ":")).encode(), LEVEL)
        ids = tuple(item["id"] for item in (*items, *response["output"]))
        return cls(namespace, response["id"], agent, response["previous_response_id"], ids, content)


def open_records(
    path: Path | None, *, max_responses: int, max_bytes: int, retention_s: float, given: Given = NOTHING_GIVEN
) -> Records:
    """Open the file at `path`, or create it; a damaged one is set aside. None: in memory.

    Rows that do not verify are deleted. `given`: what the keys of its directory are made from or opened with. Raises
    StoreError if the file cannot be used, StoreRefused if the disk is the cause.
    """

    def prepared(connection: sqlite3.Connection, keys: StoreKeys) -> Records:
        tables = ResponseTables(keys)
        _bring_up(connection, path)
        (num_bytes,) = connection.execute(_NUM_BYTES).fetchone()
        if num_bytes <= QUICKLY_CHECKED_BYTES:
            _check(connection, tables)
        if tables.has_damaged(connection):
            with transaction(connection):
                tables.drop_damaged(connection)
        erase_traces_left(connection, path)
        return Records(connection, tables, max_responses=max_responses, max_bytes=max_bytes, retention_s=retention_s)

    return opened(path, prepared, busy_s=BUSY_S, given=given)


def _bring_up(connection: sqlite3.Connection, path: Path | None) -> None:
    """Create the tables that are missing, all of them in a new file; StoreError for a file of a newer format."""
    version, names = version_of(connection)
    if version not in range(FORMAT + 1):
        raise StoreError(f"{path} has format {version}, this version of Rekindle knows {FORMAT}: move it away")
    if version != FORMAT:  # a full disk refuses transactions, and reading needs none
        missing = [table.create for table in TABLES if table.name not in names]
        create(connection, [*missing, *INDEXES], FORMAT)
    if not schema_of(connection) >= {table.described for table in TABLES}:
        raise sqlite3.DatabaseError("its tables are not those of stored responses")


def _check(connection: sqlite3.Connection, tables: ResponseTables) -> None:
    """Repair a file whose indexes do not match its rows; sqlite3.DatabaseError if it is damaged beyond that."""
    if (found := problem(connection, "integrity_check")) is None:
        return
    logger.error("the file of stored responses is damaged and is repaired: %s; check the disk", found)
    with transaction(connection):
        tables.repair(connection)
        if (found := problem(connection, "integrity_check")) is not None:
            raise sqlite3.DatabaseError(found)


class Records(SqliteFile):
    """The open file. Bounds: responses of a namespace, their packed bytes, seconds since a response was last used."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        tables: ResponseTables,
        *,
        max_responses: int,
        max_bytes: int,
        retention_s: float,
    ) -> None:
        super().__init__(connection, "stored responses", damage=(zlib.error, ValueError))
        self._tables = tables
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_receipts = min(MAX_RECEIPTS, max(1, max_bytes // 32 // NUM_BYTES))
        self._retention_s = retention_s
        self._reported: set[int] = set()  # numbers of damaged rows already logged
        self._has_traces = True  # whether the file may hold traces of deleted responses; it is not rewritten each time

    def _match(self, *values: str | None) -> tuple[Any, ...]:
        """What rows have where they are found by these values."""
        return tuple(map(self._tables.response.match, values))

    def find(self, namespace: str, id: str, *, now: float) -> tuple[str | None, dict[str, Any], list[Item]] | None:
        """Return agent, response and items of an id; None if there is none or it is too old."""

        def look(connection: sqlite3.Connection) -> tuple[str | None, dict[str, Any], list[Item]] | None:
            which = "WHERE namespace = ? AND id = ? AND last_use >= ?"
            oldest = now - self._retention_s
            row = next(self._tables.response.rows(connection, which, *self._match(namespace, id), oldest), None)
            if row is None:
                return None
            content = next(self._tables.content.rows(connection, "WHERE number = ?", row.number), None)
            if content is None:
                return None
            if not (self._tables.response.holds(row) and self._tables.content.holds(content)):
                if row.number not in self._reported:
                    self._reported.add(row.number)
                    logger.error("response %s is damaged and counts as missing: check the disk", id)
                return None
            response, items = json.loads(zlib.decompress(content.packed))
            return row.agent, response, items

        return self._repaired(self.reading, look)

    def holder(self, namespace: str, item: str) -> str | None:
        """Return the id of the response that holds an item, or None."""

        def look(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(
                "SELECT response.id FROM item JOIN response USING(namespace, number) "
                "WHERE namespace = ? AND item.id = ?",
                self._match(namespace, item),
            ).fetchone()
            return None if row is None else str(self._tables.response.says("id", row[0]))

        return self._repaired(self.reading, look)

    def receipts(self, namespace: str, id: str) -> list[Receipt]:
        """Return the receipts of an answer by choice; empty if there are none."""
        return self._repaired(self.reading, lambda connection: self._tables.receipts.find(connection, namespace, id))

    def forget_receipts(self, namespace: str, ids: Iterable[str]) -> None:
        """Delete the receipts of these answers."""

        def remove(connection: sqlite3.Connection) -> None:
            self._has_traces |= self._tables.receipts.delete(connection, namespace, ids)

        self._repaired(self.writing, remove)

    def save(self, entries: Sequence[Entry], receipts: Sequence[Receipt], now: float) -> None:
        """Write responses in the order they came, and receipts, and delete what exceeds the bounds; all of it or
        nothing."""

        def write(connection: sqlite3.Connection) -> None:
            for entry in entries:
                self._insert(connection, entry, now)
            self._has_traces |= self._tables.receipts.insert(connection, receipts, most=self._max_receipts)
            self._make_room(connection, {entry.namespace for entry in entries}, now)

        self._repaired(self.writing, write)

    def _repaired(
        self, begin: Callable[[], AbstractContextManager[sqlite3.Connection]], work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """Run `work`; if it meets damage, repair the file and run it once more."""
        try:
            with begin() as connection:
                return work(connection)
        except StoreError as error:
            if error.__cause__ is None or kind_of(error.__cause__) == "other":
                raise
            logger.error("the file of stored responses is damaged and is repaired: %s; check the disk", error.__cause__)
        with self.writing() as connection:
            self._has_traces = True
            self._tables.repair(connection)
        with begin() as connection:
            return work(connection)

    def _insert(self, connection: sqlite3.Connection, entry: Entry, now: float) -> None:
        space, previous, *ids = self._match(entry.namespace, entry.previous, *entry.items)
        found = connection.execute("SELECT depth FROM response WHERE namespace = ? AND id = ?", (space, previous))
        above = found.fetchone()
        depth = above[0] + 1 if above else 0
        owned = entry.namespace, entry.id, entry.agent, entry.previous
        number = self._tables.response.add(connection, ResponseRow(0, *owned, depth, now, len(entry.content))).number
        # A row that already has this number belongs to no response: its number was changed.
        self._tables.content.replace(connection, ContentRow(number, entry.content))
        items = [(space, item, number) for item in ids]
        connection.executemany("INSERT OR IGNORE INTO item VALUES(?, ?, ?)", items)
        if entry.previous is not None:
            chain = {"namespace": space, "id": previous, "now": now}
            connection.execute(_USE_CHAIN, chain)

    def _make_room(self, connection: sqlite3.Connection, namespaces: Iterable[str], now: float) -> None:
        """Delete responses that are too old, then the oldest of each of these namespaces that exceeds its bounds."""
        old = connection.execute("SELECT number FROM response WHERE last_use < ?", (now - self._retention_s,))
        self._delete(connection, [number for (number,) in old])
        for namespace in self._match(*namespaces):
            count = "SELECT count(*), total(num_bytes) FROM response WHERE namespace = ?"
            num_stored, num_bytes = connection.execute(count, (namespace,)).fetchone()
            order = (
                "SELECT number, num_bytes FROM response WHERE namespace = ? ORDER BY last_use, depth DESC, number DESC"
            )
            gone = []
            for number, size in connection.execute(order, (namespace,)):
                if num_stored <= self._max_responses and num_bytes <= self._max_bytes:
                    break
                gone.append(number)
                num_stored, num_bytes = num_stored - 1, num_bytes - size
            self._delete(connection, gone)

    def _delete(self, connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
        self._has_traces |= bool(numbers)
        delete_all(connection, numbers)

    def delete(self, namespace: str, id: str) -> bool:
        """Delete one response; return whether there was one."""

        def remove(connection: sqlite3.Connection) -> bool:
            which = "SELECT number FROM response WHERE namespace = ? AND id = ?"
            rows = connection.execute(which, self._match(namespace, id))
            numbers = [number for (number,) in rows]
            self._delete(connection, numbers)
            return bool(numbers)

        return self._repaired(self.writing, remove)

    def forget(self, namespace: str, agent: str) -> int:
        """Delete an agent's responses and receipts and rewrite the file: moved cells leave copies in it that no
        deletion finds. If the process is killed meanwhile, the next open does it. Return how many responses there were.

        A row that does not verify may also be the agent's, so it is deleted. Raises StoreError also if something is
        left: then call it again.
        """

        def remove(connection: sqlite3.Connection) -> int:
            if self._tables.has_damaged(connection):
                self._tables.drop_damaged(connection)
                self._has_traces = True
            rows = connection.execute(
                "SELECT number FROM response NOT INDEXED WHERE namespace = ? AND agent = ?",
                self._match(namespace, agent),
            )  # a damaged index might miss one
            numbers = [number for (number,) in rows]
            self._delete(connection, numbers)
            drop_strays(connection)
            self._has_traces |= self._tables.receipts.forget(connection, namespace, agent) > 0
            if self._has_traces:
                note_traces(connection)
            return len(numbers)

        num_deleted = self._repaired(self.writing, remove)
        if self._has_traces:
            with self.reading() as connection:
                if not erase_traces(connection):
                    raise StoreError(
                        "the log of stored responses could not be emptied, another process reads it: try again"
                    )
            self._has_traces = False
        return num_deleted

    def check(self) -> None:
        """Assert that every row has its content and its depth, and that each namespace is within its bound."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT number, namespace, id, previous, depth, last_use FROM response"
            ).fetchall()
            for namespace, count in Counter(row[1] for row in rows).items():
                assert count <= self._max_responses, (namespace, count)
            numbers = {row[0] for row in rows}
            for table in ("content", "item"):
                strange = {n for (n,) in connection.execute(f"SELECT number FROM {table}")} - numbers
                assert not strange, (table, strange)
            assert {n for (n,) in connection.execute("SELECT number FROM content")} == numbers
            for whole in self._tables.response.rows(connection):
                assert self._tables.response.holds(whole), whole
            self._tables.receipts.check(connection)
            above = {(row[1], row[2]): row for row in rows}
            for row in rows:
                parent = above.get((row[1], row[3]))
                assert parent is None or (parent[4] < row[4] and parent[5] >= row[5]), (row, parent)
