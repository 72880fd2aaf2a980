"""MACs that verify that rows of the session file are as they were written.

A session's row has two MACs: `mac` over its identity and setup, and `progress` over what changes with each event, so
that an event rehashes only three numbers. `progress` includes the number of events, so truncation is detected as well
as gaps. Rows of `event` and `memory` have one MAC each.

A MAC does not prove that a row is the newest version: a stale page in place of the current one is detected only if its
rows no longer fit those of other pages.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Sequence
from typing import Any

from rekindle.store.row_macs import TableMac, row_key

# Columns in the order they are read and hashed, the MAC last.
SESSION = "number, namespace, id, created, plan, preludes, mac"
PROGRESS = "number, last_use, num_events, progress"
EVENT = "session, number, at, kind, body, mac"
MEMORY = "namespace, agent, at, prelude, forgotten, mac"
NO_MAC = b""  # of a row that cannot be authenticated


class SessionMacs:
    """The MACs of one file, keyed by the secret in its directory."""

    def __init__(self, secret: bytes) -> None:
        key = row_key(secret, "sessions")
        self.session = TableMac(key, "session", "ittftt")
        self.progress = TableMac(key, "progress", "ifi")
        self.event = TableMac(key, "event", "iiftt")
        self.memory = TableMac(key, "memory", "ttfni")

    def vouch(self, connection: sqlite3.Connection) -> None:
        """Add MACs to the rows of a file of format 2, one session at a time; malformed rows get none."""
        for (number,) in connection.execute("SELECT number FROM session").fetchall():
            rows = connection.execute(f"SELECT {EVENT} FROM event WHERE session = ? ORDER BY number", (number,))
            macs = [(mac_or_none(self.event, row), number, row[1]) for row in rows.fetchall() if type(row[1]) is int]
            connection.executemany("UPDATE event SET mac = ? WHERE session = ? AND number = ?", macs)
            change = "UPDATE session SET num_events = ? WHERE number = ?"
            connection.execute(change, (len(macs), number))
            for columns, name, mac in ((SESSION, "mac", self.session), (PROGRESS, "progress", self.progress)):
                query = f"SELECT {columns} FROM session WHERE number = ?"
                found = mac_or_none(mac, connection.execute(query, (number,)).fetchone())
                connection.execute(f"UPDATE session SET {name} = ? WHERE number = ?", (found, number))
        for key in connection.execute("SELECT CAST(namespace AS BLOB), CAST(agent AS BLOB) FROM memory").fetchall():
            where = "WHERE namespace = CAST(? AS TEXT) AND agent = CAST(? AS TEXT)"
            row = connection.execute(f"SELECT {MEMORY} FROM memory {where}", key).fetchone()
            if row is not None:
                connection.execute(f"UPDATE memory SET mac = ? {where}", (mac_or_none(self.memory, row), *key))


def mac_or_none(mac: TableMac, row: Sequence[Any]) -> bytes:
    """Return the MAC of a row, NO_MAC if its columns have the wrong types."""
    try:
        return mac.of(row)
    except (TypeError, ValueError, struct.error):
        return NO_MAC
