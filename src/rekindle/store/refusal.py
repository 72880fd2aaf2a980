"""Which errors say that a disk is full or may not be used, so that answers can go on without it.

All others, a lock, a link or a foreign file, are the operator's to look at first.
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
    """The error to raise with this message: a StoreRefused where the disk refuses."""
    if isinstance(error, OSError):
        is_refused = error.errno in _NUMBERS
    else:
        is_refused = getattr(error, "sqlite_errorcode", 0) & 0xFF in _CODES  # the rest says how it came to that
    return (StoreRefused if is_refused else StoreError)(message)
