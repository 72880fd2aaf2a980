"""Read connections to one SQLite file, each used by one reader at a time.

Owns the open connections. Any thread may read, even during `close`: a reader that finishes later closes its own
connection, so none leaks.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.store.sqlite_file import connect


class ReadConnections:
    """A pool as large as the most concurrent readers so far. Raises sqlite3.Error if unreadable or closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = False

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for exclusive use inside the `with` block."""
        connection = self._take() or self._open()
        try:
            yield connection
        finally:
            self._give_back(connection)

    def _take(self) -> sqlite3.Connection | None:
        with self._lock:
            if self._is_closed:
                raise sqlite3.ProgrammingError(f"{self._path} is closed")
            return self._idle.pop() if self._idle else None

    def _open(self) -> sqlite3.Connection:
        connection = connect(self._path)
        connection.execute("PRAGMA query_only = ON")
        return connection

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Refuse new readers; reads in progress may finish."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
