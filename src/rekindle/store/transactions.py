"""One SQLite connection that any thread may use, one after the other, for the small files beside the store."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator

from rekindle.errors import StoreError
from rekindle.store.damage import kind_of

logger = logging.getLogger(__name__)


class Transactions:
    """Base of whoever keeps such a file: what cannot be read or written is a StoreError that begins with `what`.

    `damage`: errors other than SQLite's own that mean the same, of reading what a row holds. `file_error`: how the file
    itself was found damaged since it was opened, logged once; None: it was not.
    """

    def __init__(self, connection: sqlite3.Connection, what: str, *, damage: tuple[type[Exception], ...] = ()) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._what = what
        self._damage: tuple[type[Exception], ...] = (sqlite3.Error, *damage)
        self.file_error: str | None = None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connection
            except self._damage as error:
                if kind_of(error) == "file" and self.file_error is None:
                    self.file_error = f"{self._what} cannot be used ({error}): restart, and a damaged file is set aside"
                    logger.error("%s. Check the disk.", self.file_error)
                raise StoreError(f"{self._what} cannot be used: {error}") from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing."""
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file; closing twice is safe."""
        with self._lock:
            self._connection.close()
