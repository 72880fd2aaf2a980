"""How the index keeps the bytes that a store wrote on a day: two rows of `meta`, changed with what else is.

Knows no clock, and not what is counted (`maintenance.wear` does).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

DAY_S = 86400
_DAY, _BYTES = "written.day", "written.bytes"


def day_of(now: float) -> int:
    """Return the number of the day (UTC) of a wall time; those before 1970 are negative."""
    return int(now // DAY_S)


class Written(NamedTuple):
    """Bytes written on one day, which counts from 1970 in UTC."""

    day: int = 0
    num_bytes: int = 0

    @classmethod
    def kept(cls, marks: Mapping[str, int]) -> Written:
        """What these rows of `meta` say; nothing if they are missing."""
        day, num_bytes = marks.get(_DAY), marks.get(_BYTES)
        is_there = isinstance(day, int) and isinstance(num_bytes, int) and num_bytes >= 0
        return cls(day, num_bytes) if is_there and day is not None and num_bytes is not None else cls()

    def marks(self) -> dict[str, int]:
        """The rows of `meta` that keep it."""
        return {_DAY: self.day, _BYTES: self.num_bytes}

    def on(self, day: int) -> int:
        """Bytes written on that day, as far as it is this one."""
        return self.num_bytes if day == self.day else 0


NOTHING_WRITTEN = Written()


def read_written(connection: sqlite3.Connection) -> Written:
    """What the index of another store keeps; sqlite3.Error."""
    rows = connection.execute("SELECT key, value FROM meta WHERE key IN (?, ?)", (_DAY, _BYTES))
    return Written.kept(dict(rows.fetchall()))
