"""Verifies the rows of the file of stored responses and deletes those that were changed.

A response's row names its owner, so a MAC covers all columns that identify it; columns that only decide when it is
deleted (`depth`, `last_use`, `num_bytes`) are not covered, as they change with every use. Its content has a separate
MAC. Rows of `item` need none: the item they lead to is looked up in the content.
"""

from __future__ import annotations

import logging
import sqlite3

from rekindle.store.row_macs import TableMac, row_key

logger = logging.getLogger("rekindle.server")
_ROWS = "SELECT number, namespace, id, agent, previous, mac FROM response"


class ResponseMacs:
    """The MACs of one file, under its store's secret."""

    def __init__(self, secret: bytes) -> None:
        key = row_key(secret, "responses")
        self.response = TableMac(key, "response", "ittnn")
        self.content = TableMac(key, "content", "ib")

    def has_damaged(self, connection: sqlite3.Connection) -> bool:
        """Whether the row of any response does not verify; 30 ms for 10,000."""
        return not all(map(self.response.holds, connection.execute(_ROWS)))

    def repair(self, connection: sqlite3.Connection) -> None:
        """Rebuild the indexes and delete what does not verify, inside a transaction; sqlite3.Error if the tables
        themselves are damaged."""
        connection.execute("REINDEX")
        if self.has_damaged(connection):
            self.drop_damaged(connection)
        drop_strays(connection)

    def drop_damaged(self, connection: sqlite3.Connection) -> None:
        """Delete responses whose rows do not verify, inside a transaction."""
        damaged = [(row[0],) for row in connection.execute(_ROWS).fetchall() if not self.response.holds(row)]
        logger.error("%d stored responses are damaged and count as missing: check the disk", len(damaged))
        for table in ("response", "content", "item"):
            connection.executemany(f"DELETE FROM {table} WHERE number = ?", damaged)
        connection.execute("DELETE FROM response WHERE number NOT IN (SELECT number FROM content)")
        drop_strays(connection)


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
