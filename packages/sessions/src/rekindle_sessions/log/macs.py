"""MACs that verify that rows of the session file are as they were written.

A session's row has two MACs: `mac` over its identity and setup, and `progress` over what changes with each event, so
that an event rehashes only three numbers. `progress` includes the number of events, so truncation is detected as well
as gaps. Rows of `event` and `memory` have one MAC each.

A MAC does not prove that a row is the newest version: a stale page in place of the current one is detected only if its
rows no longer fit those of other pages.
"""

from __future__ import annotations

from rekindle.store.row_macs import TableMac, row_key

# Columns in the order they are read and hashed, the MAC last.
SESSION = "number, namespace, id, created, plan, preludes, mac"
PROGRESS = "number, last_use, num_events, progress"
EVENT = "session, number, at, kind, body, mac"
MEMORY = "namespace, agent, at, prelude, forgotten, mac"


class SessionMacs:
    """The MACs of one file, keyed by the secret in its directory."""

    def __init__(self, secret: bytes) -> None:
        key = row_key(secret, "sessions")
        self.session = TableMac(key, "session", "ittftt")
        self.progress = TableMac(key, "progress", "ifi")
        self.event = TableMac(key, "event", "iiftt")
        self.memory = TableMac(key, "memory", "ttfni")
