"""Index damage found since it was opened: rows that do not verify, or a damaged file; what an error of a file means.

Owns the count, its meaning, and which errors mean damage or a disk that refuses, when a file is opened and later. A
damaged row counts as missing; the writer drops and repairs rows before its next transaction. A damaged file (an SQLite
B-tree) can no longer be written: it is marked, and the next open sets it aside and rebuilds it from the records. Each
kind is logged once. Any thread may report.
"""

from __future__ import annotations

import errno
import logging
import re
import sqlite3
import threading
from collections.abc import Callable
from typing import Literal

from rekindle.errors import StoreError, StoreRefused

logger = logging.getLogger(__name__)

# What a query may raise: SQLite has no checksums, so a column may hold a value of any type.
INDEX_DAMAGE = (sqlite3.Error, ValueError, TypeError, OverflowError)
_UNIQUE = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
_BROKEN_FILE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_GONE = re.compile(r"no such (table|column)|has no column|columns but")  # SQLITE_ERROR's messages for a damaged schema
_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
_CODES = frozenset(
    (sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
)


class DamagedRow(ValueError):
    """A row that an index change depends on does not verify."""


def kind_of(error: BaseException) -> Literal["rows", "file", "other"]:
    """Classify an error: damaged rows, a damaged file, or neither (a full disk, a refused change)."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code in _UNIQUE:
            return "rows"  # two rows claim one slot, or one hash
        is_gone = code == sqlite3.SQLITE_ERROR and _GONE.search(str(error)) is not None
        return "file" if is_gone or code & 0xFF in _BROKEN_FILE else "other"
    return "rows" if isinstance(error, (*INDEX_DAMAGE, AssertionError)) else "other"


def is_damage_at_open(error: OSError | sqlite3.DatabaseError) -> bool:
    """Whether an error from opening a file means that it is damaged, rather than a disk, lock or permission problem.

    Wider than `kind_of`: no full disk has ended a transaction yet, so any SQL error is a damaged schema.
    """
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return not isinstance(error, OSError)


def refusal(error: OSError | sqlite3.Error, message: str) -> StoreError:
    """The error to raise with this message: a StoreRefused, with which serving can continue, if the disk is full or
    forbids it; all others (a lock, a link, a foreign file) are for the operator to examine first."""
    if isinstance(error, OSError):
        is_refused = error.errno in _NUMBERS
    else:
        is_refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _CODES  # the upper bits give the details
    return (StoreRefused if is_refused else StoreError)(message)


class IndexDamage:
    """Damage state: `num_rows` did not verify; `file_error` describes file damage, or is None.

    `mark` durably notes that the file is damaged.
    """

    def __init__(self, mark: Callable[[], None]) -> None:
        self.num_rows = 0
        self.file_error: str | None = None
        self._mark = mark
        self._is_due = False
        self._is_logged = False
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether rows must be repaired before the next change."""
        return self._is_due and self.file_error is None

    def found(self, what: str) -> None:
        """Report a row that does not verify, or a required row that is missing."""
        with self._lock:
            self._is_due = True
            is_logged, self._is_logged = self._is_logged, True
        if not is_logged:
            logger.error(
                "the store's index holds damaged rows, which count as missing and are repaired with the next save; "
                "the first: %s. Check the disk.",
                what,
            )

    def repaired(self, num_rows: int) -> None:
        """Report that `num_rows` damaged rows were dropped or repaired."""
        with self._lock:
            self._is_due = False
            self.num_rows += num_rows

    def broken(self, error: BaseException) -> None:
        """Report that the file itself is damaged."""
        with self._lock:
            is_new, self.file_error = self.file_error is None, self.file_error or str(error)
        if is_new:
            logger.error(
                "the store's index is damaged (%s): nothing is saved until a restart, which rebuilds it from the "
                "records. Check the disk.",
                error,
            )
            self._mark()
