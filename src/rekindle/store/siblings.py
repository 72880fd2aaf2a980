"""Other models' stores in the same directory: whether they know an agent.

Their blocks are useless to this model, but knowing of them explains a miss after a model change. Owns no file: a
sibling's index is opened for one query and closed again.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from rekindle.store.schema import agent_key


def known_to_sibling(own: Path, namespace: str, agent: str, secret: bytes) -> bool:
    """Whether the store of another fingerprint next to `own` has this agent. One lookup per sibling.

    An unreadable sibling counts as not knowing it: the result is used only in explanations.
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
    """A connection for querying the index of a store that others may have open."""
    # "rw" does not create a missing file, but may create the shared memory that reading a WAL needs.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=1)
    connection.execute("PRAGMA query_only = ON")
    return connection
