"""Whether rows of the file of kept responses are as they were written, and what becomes of those that are not.

A response's row says whose it is, so it is held against a MAC over all that names it; what decides only when it goes
(`depth`, `last_use`, `num_bytes`) is not hashed, as it changes with every use. Its content has a MAC of its own. Rows
of `item` need none: what they lead to is looked for in the content.
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

    def vouch(self, connection: sqlite3.Connection) -> None:
        """Give the rows of a file of format 1 their MACs."""
        for table in ("response", "content"):
            connection.execute(f"ALTER TABLE {table} ADD COLUMN mac BLOB NOT NULL DEFAULT x''")
        rows = [(self.response.of(row), row[0]) for row in connection.execute(_ROWS).fetchall()]
        connection.executemany("UPDATE response SET mac = ? WHERE number = ?", rows)
        for (number,) in connection.execute("SELECT number FROM content").fetchall():
            row = connection.execute("SELECT number, packed FROM content WHERE number = ?", (number,)).fetchone()
            connection.execute("UPDATE content SET mac = ? WHERE number = ?", (self.content.of(row), number))

    def has_damaged(self, connection: sqlite3.Connection) -> bool:
        """Whether the row of some response does not verify; 30 ms for 10,000."""
        return not all(map(self.response.holds, connection.execute(_ROWS)))

    def repair(self, connection: sqlite3.Connection) -> None:
        """Make the indexes anew and delete what does not verify, inside a transaction; sqlite3.Error where the tables
        themselves are damaged."""
        connection.execute("REINDEX")
        if self.has_damaged(connection):
            self.drop_damaged(connection)
        drop_strays(connection)

    def drop_damaged(self, connection: sqlite3.Connection) -> None:
        """Delete responses whose rows do not verify, inside a transaction."""
        damaged = [(row[0],) for row in connection.execute(_ROWS).fetchall() if not self.response.holds(row)]
        logger.error("%d kept responses are damaged and count as not there: check the disk", len(damaged))
        for table in ("response", "content", "item"):
            connection.executemany(f"DELETE FROM {table} WHERE number = ?", damaged)
        connection.execute("DELETE FROM response WHERE number NOT IN (SELECT number FROM content)")
        drop_strays(connection)


def drop_strays(connection: sqlite3.Connection) -> None:
    """Delete contents and items of responses that are not there, and items of another namespace than theirs.

    An item whose key was changed is out of order, so nothing that looks for it by its key can delete it: the table is
    written anew.
    """
    connection.execute("DELETE FROM content WHERE number NOT IN (SELECT number FROM response)")
    rows = connection.execute(
        "SELECT item.namespace, item.id, item.number FROM item NOT INDEXED "
        "JOIN response ON response.number = item.number AND response.namespace = item.namespace"
    ).fetchall()
    connection.execute("DELETE FROM item")
    connection.executemany("INSERT OR IGNORE INTO item VALUES(?, ?, ?)", rows)
