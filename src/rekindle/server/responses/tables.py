"""The tables of the file of stored responses: their rows, and how damaged ones are dropped.

response    a row each, small; its MAC covers what says whose it is, not what only decides when it is deleted, which
            changes with every use
content     its content, under the same number
item        which response holds an item; no MAC: the item is looked up in the content that it leads to
receipt     see `receipt_rows`
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from rekindle.server.responses.receipt_rows import RECEIPT, ReceiptRows
from rekindle.store.files.keys import StoreKeys
from rekindle.store.files.table import KeyedTable, Mac, Table, row_key
from rekindle.store.files.veil import Veil

logger = logging.getLogger("rekindle.server")


class ResponseRow(NamedTuple):
    """Whose a response is, the response it continues, and what decides when it is deleted."""

    number: Annotated[int, "INTEGER PRIMARY KEY"]
    namespace: str
    id: str
    agent: str | None
    previous: str | None
    depth: int
    last_use: float
    num_bytes: int
    mac: Mac = b""


class ContentRow(NamedTuple):
    """A response and the items of its request, packed."""

    number: Annotated[int, "INTEGER PRIMARY KEY"]
    packed: bytes
    mac: Mac = b""


class ItemRow(NamedTuple):
    """The response that holds an item."""

    namespace: str
    id: str
    number: int


_OWNED = ("number", "namespace", "id", "agent", "previous")
RESPONSE = Table("response", ResponseRow, "UNIQUE(namespace, id)", options="", covered=_OWNED, matched=_OWNED[1:])
CONTENT = Table("content", ContentRow, options="", sealed=("packed",))
ITEM = Table("item", ItemRow, "PRIMARY KEY(namespace, id)")
OF_RESPONSES: tuple[Table[Any], ...] = (RESPONSE, CONTENT, ITEM)
TABLES: tuple[Table[Any], ...] = (*OF_RESPONSES, RECEIPT)
INDEXES = (
    "CREATE INDEX IF NOT EXISTS response_agent ON response(namespace, agent)",
    "CREATE INDEX IF NOT EXISTS response_use ON response(last_use, depth)",
    "CREATE INDEX IF NOT EXISTS response_space ON response(namespace, last_use, depth, num_bytes)",
    "CREATE INDEX IF NOT EXISTS item_number ON item(number)",
)


class ResponseTables:
    """The tables of one file, under its store's keys."""

    def __init__(self, keys: StoreKeys) -> None:
        key, veil = row_key(keys.secret, "responses"), Veil.of(keys, "responses")
        self.response = KeyedTable(RESPONSE, key, veil)
        self.content = KeyedTable(CONTENT, key, veil)
        self.receipts = ReceiptRows(key, veil)

    def has_damaged(self, connection: sqlite3.Connection) -> bool:
        """Whether the row of any response does not verify; 30 ms for 10,000."""
        return not all(map(self.response.holds, self.response.rows(connection)))

    def repair(self, connection: sqlite3.Connection) -> None:
        """Rebuild the indexes and delete what does not verify, inside a transaction; sqlite3.Error if the tables
        themselves are damaged."""
        connection.execute("REINDEX")
        if self.has_damaged(connection):
            self.drop_damaged(connection)
        drop_strays(connection)

    def drop_damaged(self, connection: sqlite3.Connection) -> None:
        """Delete responses whose rows do not verify, inside a transaction."""
        damaged = [row.number for row in self.response.rows(connection) if not self.response.holds(row)]
        logger.error("%d stored responses are damaged and count as missing: check the disk", len(damaged))
        delete_all(connection, damaged)
        connection.execute("DELETE FROM response WHERE number NOT IN (SELECT number FROM content)")
        drop_strays(connection)


def delete_all(connection: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Delete the responses with these numbers, with their contents and items."""
    for table in OF_RESPONSES:
        connection.executemany(f"DELETE FROM {table.name} WHERE number = ?", [(number,) for number in numbers])


def drop_strays(connection: sqlite3.Connection) -> None:
    """Delete contents and items of missing responses, and items whose namespace differs from their response's.

    An item whose key was changed is out of order, so no lookup by its key can delete it: the table is rewritten.
    """
    connection.execute("DELETE FROM content WHERE number NOT IN (SELECT number FROM response)")
    rows = connection.execute(
        "SELECT item.namespace, item.id, item.number FROM item NOT INDEXED "
        "JOIN response ON response.number = item.number AND response.namespace = item.namespace"
    ).fetchall()
    connection.execute("DELETE FROM item")
    connection.executemany("INSERT OR IGNORE INTO item VALUES(?, ?, ?)", rows)
