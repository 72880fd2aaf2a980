"""Which errors mean that a disk is full or not permitted, so that serving can continue without it.

All others (a lock, a link, a foreign file) are for the operator to examine first.
"""

from __future__ import annotations

import errno
import sqlite3

from rekindle.errors import StoreError, StoreRefused

_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO})
_CODES = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    }
)


def refusal(error: OSError | sqlite3.Error, message: str) -> StoreError:
    """Return the error to raise with this message: a StoreRefused if the disk refuses."""
    if isinstance(error, OSError):
        is_refused = error.errno in _NUMBERS
    else:
        is_refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _CODES  # the upper bits give the details
    return (StoreRefused if is_refused else StoreError)(message)
