"""What was found damaged in the index since it was opened: rows that do not verify, or the file itself.

Owns the count and what it means. A damaged row counts as not there; the writer drops and repairs rows before its next
transaction. A damaged file (a B-tree of SQLite) cannot be written any more: it is marked, and the next open sets it
aside and makes it anew from the records. Each is said once. Any thread may report.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable
from typing import Literal

logger = logging.getLogger(__name__)

# What a question raises: SQLite has no checksums, so a row may hold anything where its column's type is expected.
INDEX_DAMAGE = (sqlite3.Error, ValueError, TypeError, OverflowError)
_UNIQUE = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
_BROKEN_FILE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = re.compile(r"no such (table|column)|has no column|columns but")  # what SQLITE_ERROR says of a damaged schema


class DamagedRow(ValueError):
    """A row that a change of the index depends on does not verify."""


def kind_of(error: BaseException) -> Literal["rows", "file", "other"]:
    """What an error says about the index: damaged rows, a damaged file, or neither (a full disk, a refused change)."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code in _UNIQUE:
            return "rows"  # two rows claim one slot, or one name
        is_gone = code == sqlite3.SQLITE_ERROR and _GONE.search(str(error)) is not None
        return "file" if is_gone or code & 0xFF in _BROKEN_FILE else "other"
    return "rows" if isinstance(error, (*INDEX_DAMAGE, AssertionError)) else "other"


class IndexDamage:
    """`num_rows` did not verify. `mark` notes durably that the file is damaged; `file_error` says how, or is None."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self.num_rows = 0
        self.file_error: str | None = None
        self._mark = mark
        self._is_due = False
        self._is_said = False
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether rows are to be repaired before the next change."""
        return self._is_due and self.file_error is None

    def found(self, what: str) -> None:
        """A row does not verify, or one is missing that must be there."""
        with self._lock:
            self._is_due = True
            is_said, self._is_said = self._is_said, True
        if not is_said:
            logger.error(
                "the store's index holds damaged rows, they count as not there and are repaired with the next save; "
                "the first: %s. Check the disk.",
                what,
            )

    def repaired(self, num_rows: int) -> None:
        """So many damaged rows were dropped or repaired."""
        with self._lock:
            self._is_due = False
            self.num_rows += num_rows

    def broken(self, error: BaseException) -> None:
        """The file itself is damaged."""
        with self._lock:
            is_new, self.file_error = self.file_error is None, self.file_error or str(error)
        if is_new:
            logger.error(
                "the store's index is damaged (%s): nothing is saved until a restart, which makes it anew from the "
                "records. Check the disk.",
                error,
            )
            self._mark()
