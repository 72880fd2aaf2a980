"""Opening what a directory holds: its index, made anew from the records where it is damaged or missing.

Owns the decision what a trouble of SQLite means: damage is set aside and mended, a directory that cannot be used is the
operator's to mend (StoreError).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.errors import StoreError
from rekindle.spec import KVLayout
from rekindle.store.directory import StoreDirectory
from rekindle.store.index import INDEX_DAMAGE, Index
from rekindle.store.ledger import Ledger
from rekindle.store.rebuild import rebuild
from rekindle.store.records import RecordFormat
from rekindle.store.shards import Shards, found_slots
from rekindle.store.sync import FileSystem

logger = logging.getLogger(__name__)

# of OperationalError, "no such table" and the like; its other codes tell of disks, locks and permissions
_SQLITE_ERROR = 1


@dataclass(frozen=True, slots=True, eq=False)
class OpenedStore:
    """What an open store consists of, below its threads."""

    place: StoreDirectory
    index: Index
    ledger: Ledger
    shards: Shards

    def close(self) -> None:
        """Close all files and let the directory go."""
        self.index.close()
        self.shards.close()
        self.place.release()


def open_store(
    place: StoreDirectory, layout: KVLayout, shard_bytes: int, fs: FileSystem, clock: Callable[[], float]
) -> OpenedStore:
    """Open the index and the shards; a store that is not there yet is empty."""
    formats = [RecordFormat.of(layout, part.index) for part in layout.parts]
    index, ledger = _open_index(place, len(formats))
    marks = index.meta()
    fresh = "slots_per_shard.0" not in marks
    if fresh:
        slots = [found_slots(place.path, f, fs) or max(1, shard_bytes // f.record_bytes) for f in formats]
        with ledger.transaction():
            ledger.set_meta({f"slots_per_shard.{part}": count for part, count in enumerate(slots)})
    else:
        slots = [marks[f"slots_per_shard.{part}"] for part in range(len(formats))]
    shards = Shards(place.path, formats, slots, fs)
    if fresh and place.has_shards():
        count = rebuild(ledger, shards, clock())
        logger.warning("the index of %s was missing or damaged: %d blocks found again, no agents", place.path, count)
    return OpenedStore(place, index, ledger, shards)


def _open_index(place: StoreDirectory, num_parts: int) -> tuple[Index, Ledger]:
    try:
        return _readable_index(place, num_parts)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 1) != _SQLITE_ERROR:
            raise StoreError(f"the store's index {place.index_path} cannot be opened: {error}") from error
        kept = place.set_index_aside()
        logger.error("the store's index cannot be read (%s); it was set aside as %s", error, kept)
        return _readable_index(place, num_parts)


def _readable_index(place: StoreDirectory, num_parts: int) -> tuple[Index, Ledger]:
    """The index, once all that an open needs of it was read."""
    index = Index(place.index_path, num_parts)
    try:
        ledger = Ledger(index, place.secret)
        index.counts()
        index.sequences()
        return index, ledger
    except sqlite3.DatabaseError:
        index.abandon()
        raise
    except INDEX_DAMAGE as error:
        index.abandon()
        raise sqlite3.DatabaseError(f"a row is damaged: {error}") from error
