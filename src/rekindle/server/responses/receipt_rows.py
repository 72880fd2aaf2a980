"""The rows of receipts in the file of stored responses: one for each choice, the oldest are deleted first."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from rekindle.server.observers.receipts import Receipt
from rekindle.store.files.table import KeyedTable, Mac, Table
from rekindle.store.files.veil import Veil

logger = logging.getLogger("rekindle.server")
MAX_RECEIPTS = 10_000  # of a namespace
NUM_BYTES = 1024  # of one, about


class ReceiptRow(NamedTuple):
    """The receipt of one choice, its content as JSON."""

    number: Annotated[int, "INTEGER PRIMARY KEY"]
    namespace: str
    id: str
    choice: int
    agent: str | None
    content: bytes
    mac: Mac = b""

    def receipt(self) -> Receipt:
        """The receipt; ValueError if its content is none."""
        return Receipt(self.namespace, self.id, self.choice, self.agent, json.loads(self.content))


_MATCHED = ("namespace", "id", "agent")
RECEIPT = Table(
    "receipt", ReceiptRow, "UNIQUE(namespace, id, choice)", options="", sealed=("content",), matched=_MATCHED
)


class ReceiptRows:
    """The receipts of one file. Every call is given the connection, and what changes rows is in a transaction of it."""

    def __init__(self, key: bytes, veil: Veil | None) -> None:
        self._table = KeyedTable(RECEIPT, key, veil)

    def find(self, connection: sqlite3.Connection, namespace: str, id: str) -> list[Receipt]:
        """Return the receipts of an answer by choice; empty if there are none, or one of them is damaged."""
        space, name = map(self._table.match, (namespace, id))
        rows = list(self._table.rows(connection, "WHERE namespace = ? AND id = ? ORDER BY choice", space, name))
        if not all(map(self._table.holds, rows)):
            logger.error("a receipt of %s is damaged and counts as missing: check the disk", id)
            return []
        return [row.receipt() for row in rows]

    def insert(self, connection: sqlite3.Connection, receipts: Iterable[Receipt], *, most: int) -> bool:
        """Write receipts, in the place of earlier ones of the same answer and choice, and delete the oldest of a
        namespace that has more than `most`; return whether any were."""
        namespaces = set[str]()
        for each in receipts:
            key = each.namespace, each.id, each.choice
            space, name = map(self._table.match, key[:2])
            which = "namespace = ? AND id = ? AND choice = ?"
            connection.execute(f"DELETE FROM receipt WHERE {which}", (space, name, each.choice))
            content = json.dumps(each.content, separators=(",", ":")).encode()
            self._table.add(connection, ReceiptRow(0, *key, each.agent, content))
            namespaces.add(each.namespace)
        num_before = connection.total_changes
        for namespace in map(self._table.match, namespaces):
            (count,) = connection.execute("SELECT count(*) FROM receipt WHERE namespace = ?", (namespace,)).fetchone()
            if count > most:  # a tenth more than needed, so that not every answer sorts them
                oldest = "SELECT number FROM receipt WHERE namespace = ? ORDER BY number LIMIT ?"
                excess = count - most + most // 10
                connection.execute(f"DELETE FROM receipt WHERE number IN ({oldest})", (namespace, excess))
        return connection.total_changes > num_before

    def delete(self, connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> bool:
        """Delete the receipts of these answers; return whether there were any."""
        space, num_before = self._table.match(namespace), connection.total_changes
        answers = [(space, name) for name in map(self._table.match, ids)]
        connection.executemany("DELETE FROM receipt WHERE namespace = ? AND id = ?", answers)
        return connection.total_changes > num_before

    def forget(self, connection: sqlite3.Connection, namespace: str, agent: str) -> int:
        """Delete an agent's receipts, and damaged ones, which may be the agent's; return how many there were."""
        gone: list[tuple[Any]] = [
            (row.number,)
            for row in self._table.rows(connection, "NOT INDEXED")
            if (row.namespace, row.agent) == (namespace, agent) or not self._table.holds(row)
        ]
        connection.executemany("DELETE FROM receipt WHERE number = ?", gone)
        return len(gone)

    def check(self, connection: sqlite3.Connection) -> None:
        """Assert that every row verifies."""
        assert all(map(self._table.holds, self._table.rows(connection))), "a receipt does not verify"
