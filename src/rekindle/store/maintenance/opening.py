"""Open a store directory, rebuilding its index from the records if it is damaged or missing.

Owns the decision what an SQLite error means: a damaged file is set aside and rebuilt; an unusable directory is for the
operator to fix (StoreError).
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rekindle.spec import KVLayout
from rekindle.store.files.damage import INDEX_DAMAGE, DamagedRow, is_damage_at_open, refusal
from rekindle.store.files.directory import StoreDirectory
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.shards import Shards, found_slots
from rekindle.store.files.sync import FileSystem
from rekindle.store.maintenance.other_stores import OtherStores
from rekindle.store.maintenance.room import budget
from rekindle.store.rows.index import Index
from rekindle.store.rows.ledger import Ledger
from rekindle.store.rows.rebuild import RebuildReport, Salvaged, rebuild, salvage

logger = logging.getLogger(__name__)

# A full check takes a third of a second for an index of 20,000 blocks, 15 s for 640,000 (540 MB).
QUICKLY_CHECKED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class OpenedStore:
    """The parts of an open store, without its threads."""

    place: StoreDirectory
    index: Index
    ledger: Ledger
    shards: Shards
    others: OtherStores
    rebuilt: RebuildReport | None

    def budget(self, disk_bytes: int | None, fs: FileSystem) -> int:
        """Bytes that the records of all models in the directory may take now, given the configured `disk_bytes`."""
        used = sum(f.record_bytes * self.ledger.slots.num_used(f.part) for f in self.shards.formats)
        return budget(disk_bytes, free_bytes=fs.free_bytes(self.place.path), used_bytes=used + self.others.num_bytes())

    def computed_from(self, by: int) -> int | None:
        """As `Ledger.computed_from`; None, so that nothing counts as its own, if the disk refuses to note it."""
        try:
            return self.ledger.computed_from(by)
        except sqlite3.OperationalError as error:
            logger.warning("restored blocks are not checked: what computes them could not be noted: %s", error)
            return None

    def close(self) -> None:
        """Close all files and release the directory."""
        self.index.close()
        self.shards.close()
        self.place.release()


def open_store(
    place: StoreDirectory,
    layout: KVLayout,
    shard_bytes: int,
    fs: FileSystem,
    clock: Callable[[], float],
    namespaces: Iterable[str] = (),
) -> OpenedStore:
    """Open the index and the shards, creating an empty store if there is none.

    A damaged index is set aside and rebuilt, which recovers chains of these `namespaces`.
    """
    try:
        return _open(place, layout, shard_bytes, fs, clock, namespaces)
    except sqlite3.DatabaseError as error:
        if not is_damage_at_open(error):
            message = (
                f"the store's index {place.index_path} cannot be opened: {error}; "
                "check the permissions and the space of its directory, or choose another as store"
            )
            raise refusal(error, message) from error
        kept = place.set_index_aside()
        logger.error("the store's index cannot be read (%s); it was set aside as %s", error, kept)
        return _open(place, layout, shard_bytes, fs, clock, namespaces)


def _open(
    place: StoreDirectory,
    layout: KVLayout,
    shard_bytes: int,
    fs: FileSystem,
    clock: Callable[[], float],
    namespaces: Iterable[str],
) -> OpenedStore:
    formats = [RecordFormat.of(layout, part.index) for part in layout.parts]
    suspicion = place.suspicion()
    index, ledger = readable_index(place, layout)
    others = OtherStores(place.path, fs)
    try:
        slots = shard_slots(index)
        if slots is not None:
            shards = Shards(place.path, formats, slots, fs, are_sealed=place.keys.data is not None)
            repair_rows(ledger, shards, clock())
            if suspicion == "crashed":
                _settle_covers(ledger, shards, clock())
            ledger.clamp_future_uses(clock())
            place.forget_damage()
            return OpenedStore(place, index, ledger, shards, others, None)
        slots = [found_slots(place.path, f, fs) or max(1, shard_bytes // f.record_bytes) for f in formats]
        settings = {f"slots_per_shard.{part}": count for part, count in enumerate(slots)}
        shards, report = Shards(place.path, formats, slots, fs, are_sealed=place.keys.data is not None), None
        if place.has_shards():
            kept = place.last_set_aside()
            salvaged = salvage(kept, place.keys, shards) if kept is not None else Salvaged()
            spaces = {*namespaces, *(known.record.namespace for known in salvaged.branches)}
            roots = {place.root(name): name for name in spaces}
            report = rebuild(ledger, shards, clock(), namespaces=roots, salvaged=salvaged, settings=settings)
            logger.warning("the index of %s was missing or damaged and was rebuilt: %s", place.path, report.summary())
        else:
            with ledger.transaction():
                ledger.slots.set_meta(settings)
        place.forget_damage()
        return OpenedStore(place, index, ledger, shards, others, report)
    except BaseException:
        index.abandon()
        raise


def shard_slots(index: Index) -> list[int] | None:
    """Slots per shard of each part; None for a new index, sqlite3.DatabaseError if they are lost."""
    marks = index.meta()
    slots = [marks.get(f"slots_per_shard.{part}") for part in range(index.num_parts)]
    known = [count for count in slots if isinstance(count, int) and count > 0]
    if len(known) == len(slots):
        return known
    if marks or index.has_blocks() or index.counts() != (0, 0):
        raise sqlite3.DatabaseError(f"its settings are damaged: {marks}")
    return None


def readable_index(place: StoreDirectory, layout: KVLayout) -> tuple[Index, Ledger]:
    """Open the index and read all that an open needs; sqlite3.DatabaseError if it cannot be read.

    Checks everything if that is quick or damage was noted; after a crash, checks that its pages can be read.
    """
    suspicion = place.suspicion()
    try:
        index = Index(place.index_path, len(layout.parts), keys=place.keys, mark_damaged=place.note_damage)
    except UnicodeDecodeError as error:  # SQLite's message about a damaged schema quotes it
        raise sqlite3.DatabaseError(f"its schema is damaged: {error}") from error
    try:
        ledger = Ledger(index, place.secret, layout.block_tokens, layout.ending)
        if suspicion == "damaged" or index.num_bytes <= QUICKLY_CHECKED_BYTES:
            _check_all(index, ledger)
        elif suspicion == "crashed":
            index.look_through("quick_check")
        for part in range(index.num_parts):
            if (problem := ledger.slots.beyond(part)) is not None:
                index.damage.found(problem)
        index.counts()
        index.sequences()
        return index, ledger
    except sqlite3.DatabaseError:
        index.abandon()
        raise
    except INDEX_DAMAGE as error:
        index.abandon()
        raise sqlite3.DatabaseError(f"a row is damaged: {error}") from error


def _check_all(index: Index, ledger: Ledger) -> None:
    """Check the whole index and report any damage."""
    index.look_through("integrity_check")
    index.verify_rows()
    for part in range(index.num_parts):
        if (problem := ledger.slots.differing(part)) is not None:
            index.damage.found(problem)


def _settle_covers(ledger: Ledger, shards: Shards, now: float) -> None:
    """Free the window parts that no branch needs, left by a crash."""
    try:
        with ledger.transaction() as freed:
            ledger.settle_covers()
    except DamagedRow as damaged:
        ledger.damage.found(str(damaged))
        repair_rows(ledger, shards, now)  # settles them as well
        return
    with contextlib.suppress(OSError):  # they are free anyway
        shards.punch(freed)


def repair_rows(ledger: Ledger, shards: Shards, now: float) -> None:
    """Repair damaged rows if any were found; sqlite3.DatabaseError if the file is damaged."""
    if ledger.damage.is_due:
        with ledger.transaction():
            done = ledger.repair(shards, now)
        logger.warning("the store's index was repaired: %s", done.summary())
