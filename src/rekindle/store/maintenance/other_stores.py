"""The other models' stores in a store's directory: agents they know, the bytes they take, room made by removing them.

Their blocks are useless to this model, but knowing of them explains a miss after a change of model or settings.

Owns the order in which they are removed: the least recently used first, those with pinned agents after the others. One
that a process has open is never removed. Only the writer thread makes room; any thread may ask for the bytes.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

from rekindle.config import show_bytes
from rekindle.errors import StoreError
from rekindle.spec import Change
from rekindle.store.files.description import Description, read_description
from rekindle.store.files.sqlite_file import opened_for_reading
from rekindle.store.files.sync import FileSystem
from rekindle.store.maintenance.stale import holder, inspect, last_use, remove, store_bytes, stores_in
from rekindle.store.rows.written import NOTHING_WRITTEN, Written, read_written

logger = logging.getLogger(__name__)


class OtherStores:
    """The stores next to `own`, the directory of one fingerprint."""

    def __init__(self, own: Path, fs: FileSystem) -> None:
        self._own = own
        self._fs = fs
        self._irremovable: set[Path] = set()

    def num_bytes(self) -> int:
        """Bytes on disk of all of them; costs a stat for each file."""
        return sum(store_bytes(path) for path in self._paths())

    def written_on(self, day: int) -> int:
        """Bytes that all of them wrote on a day, as their indexes keep it; those that cannot be read count as 0."""
        return sum(_written(path).on(day) for path in self._paths())

    def num_open(self) -> int:
        """How many of them a process has open. Takes each one's lock for a moment."""
        return sum(self._is_open(path) for path in self._paths())

    def make_room(self, num_bytes: int, now: float) -> None:
        """Remove stores until `num_bytes` are free, or the rest is open or cannot be removed (logged once each)."""
        for path in sorted(self._paths(), key=lambda path: (_has_pins(path, now), last_use(path))):
            if num_bytes <= 0:
                return
            taken = store_bytes(path)
            if taken and path not in self._irremovable and not self._is_open(path):
                num_bytes -= taken * self._removed(path)

    def changes(self, agent: bytes, now: Description) -> tuple[Change, ...] | None:
        """What differs in the one used last that has an agent of this key; None if none has. One lookup in each.

        Empty if it does not say what it was made from. One that cannot be read does not count: the result is used only
        in explanations.
        """
        known = [path for path in self._paths() if _answers(path, "SELECT 1 FROM agent WHERE agent = ?", agent)]
        if not known:
            return None
        with contextlib.suppress(StoreError):
            return now.changes(read_description(max(known, key=last_use), self._fs))
        return ()

    def _paths(self) -> list[Path]:
        return [path for path in stores_in(self._own.parent) if path != self._own]

    def _is_open(self, path: Path) -> bool:
        try:
            return holder(path, self._fs) is not None
        except OSError:
            return True  # its lock cannot be read, so nobody knows

    def _removed(self, path: Path) -> bool:
        try:
            info = inspect(path, self._fs)
            if not remove(path, self._fs):
                return False
        except OSError as error:
            logger.warning("the store %s of another model could not be removed to make room: %s", path, error)
            self._irremovable.add(path)
            return False
        logger.warning(
            "removed the store of %s (%s) to make room: %d agents, %s; disk_bytes is for all models of a directory, "
            "and what was least recently used goes first",
            info.model or "a model",
            path,
            info.num_agents,
            show_bytes(info.bytes),
        )
        return True


def _has_pins(path: Path, now: float) -> bool:
    """Whether an agent in the store is pinned now; False if its index cannot be read."""
    return _answers(path, "SELECT 1 FROM agent WHERE CAST(pinned_until AS REAL) > ?", now)


def _written(path: Path) -> Written:
    index = path / "index.db"
    with contextlib.suppress(OSError, sqlite3.Error):
        if not index.is_symlink():
            with contextlib.closing(opened_for_reading(index)) as connection:
                return read_written(connection)
    return NOTHING_WRITTEN


def _answers(path: Path, query: str, value: bytes | float) -> bool:
    """Whether a store's index has a row for a query; False if it cannot be read."""
    index = path / "index.db"
    with contextlib.suppress(OSError, sqlite3.Error):
        if not index.is_symlink():
            with contextlib.closing(opened_for_reading(index)) as connection:
                return connection.execute(query, (value,)).fetchone() is not None
    return False
