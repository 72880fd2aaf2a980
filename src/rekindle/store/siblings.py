"""What other models remember in the same directory: only whether they know an agent.

Their blocks mean nothing to this model; that somebody's memory lies there explains a miss after a model was changed.
Owns no file: siblings' indexes are opened to ask one question and closed again.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from rekindle.store.schema import agent_key


def known_to_sibling(own: Path, namespace: str, agent: str, secret: bytes) -> bool:
    """Whether the store of another fingerprint beside `own` has this agent. One look-up per sibling.

    A sibling that cannot be read counts as not knowing it: this explains, nothing depends on it.
    """
    key = agent_key(namespace, agent, secret)
    with contextlib.suppress(OSError):
        for path in own.parent.glob("*/index.db"):
            if path.parent == own or path.is_symlink():
                continue
            with contextlib.suppress(sqlite3.Error), contextlib.closing(opened_for_reading(path)) as connection:
                if connection.execute("SELECT 1 FROM agent WHERE agent = ?", (key,)).fetchone():
                    return True
    return False


def opened_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that asks the index of a store that others may have open."""
    # "rw" makes no file that is missing, yet may make the shared memory that reading a WAL needs.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=1)
    connection.execute("PRAGMA query_only = ON")
    return connection
