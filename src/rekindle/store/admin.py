"""Offline maintenance of a store: list, check, rebuild, purge. Needs no model.

Everything except `list_stores` takes the store's lock (StoreLocked while a server holds it), and for an encrypted one
its `master` key. Owns no state.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.agent_ids import breakpoint_prefix
from rekindle.errors import StoreError
from rekindle.store.files.damage import INDEX_DAMAGE, DamagedRow
from rekindle.store.files.description import Description, read_description
from rekindle.store.files.directory import StoreDirectory
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.shards import SHARD_BYTES, Shards
from rekindle.store.files.sync import FileSystem, OsFileSystem
from rekindle.store.maintenance.check import check_index, damaged_blocks, shortened_branches
from rekindle.store.maintenance.opening import OpenedStore, open_store, readable_index, repair_rows, shard_slots
from rekindle.store.maintenance.purging import prove
from rekindle.store.maintenance.stale import StoreInfo, collect_stale, holders, list_stores, stale_stores
from rekindle.store.rows.index import Index
from rekindle.store.rows.rebuild import RebuildReport
from rekindle.store.values import PurgeProof, SequenceRecord

__all__ = [
    "CheckReport",
    "PurgeProof",
    "RebuildReport",
    "StoreInfo",
    "agents_of",
    "check_store",
    "collect_stale",
    "holders",
    "list_stores",
    "purge_agent",
    "rebuild_store",
    "stale_stores",
]

Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of `check_store`.

    `damaged`: (block hash in hex, what is wrong). `agents_affected`: (namespace, agent, branch, tokens left).
    `index_problem`: which index invariant is broken, or why the index cannot be read.
    """

    num_blocks: int
    damaged: list[tuple[str, str]]
    agents_affected: list[tuple[str, str, int, int]]
    index_problem: str | None

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.agents_affected and self.index_problem is None


def check_store(
    directory: Path,
    fingerprint: str,
    progress: Progress = lambda done, total: None,
    *,
    master: bytes | None = None,
    fs: FileSystem | None = None,
) -> CheckReport:
    """Verify the index and every record without repairing anything. `progress(done, total)` counts blocks."""
    fs = fs or OsFileSystem()
    with _claimed(directory, fingerprint, master, fs) as (place, described):
        if place.index_path.stat().st_size == 0 and place.has_shards():
            return CheckReport(0, [], [], "the index is missing: rebuild it from the records")
        try:
            index, _ = readable_index(place, described.layout)
        except (OSError, sqlite3.Error) as error:
            return CheckReport(0, [], [], f"the index cannot be read: {error}; rebuild it from the records")
        with closing(index):
            try:
                return _checked(place, index, described, progress, fs)
            except INDEX_DAMAGE as error:
                return CheckReport(0, [], [], f"the index is damaged: {error}; rebuild it from the records")


def rebuild_store(
    directory: Path,
    fingerprint: str,
    namespaces: Sequence[str] = ("default",),
    *,
    master: bytes | None = None,
    clock: Callable[[], float] = time.time,
    fs: FileSystem | None = None,
) -> RebuildReport:
    """Rebuild the index from the records. The old index is set aside; agents still readable in it are recovered."""
    fs = fs or OsFileSystem()
    with _claimed(directory, fingerprint, master, fs) as (place, described):
        if place.index_path.stat().st_size:
            place.set_index_aside()
        spaces = {*namespaces, *described.namespaces}
        parts = open_store(place, described.layout, SHARD_BYTES, fs, clock, spaces)
        try:
            return parts.rebuilt or RebuildReport(0, 0, 0)
        finally:
            parts.close()


def purge_agent(
    directory: Path,
    fingerprint: str,
    namespace: str,
    agent: str,
    *,
    master: bytes | None = None,
    clock: Callable[[], float] = time.time,
    fs: FileSystem | None = None,
) -> PurgeProof:
    """Delete an agent, its breakpoints and the blocks only it used, with proof, as `WarmStore.purge` does."""
    with _opened(directory, fingerprint, master, clock, fs or OsFileSystem()) as parts:
        known = {each.agent for each in parts.index.sequences() if each.namespace == namespace}
        kept = sorted(each for each in known if each.startswith(breakpoint_prefix(agent)))
        try:
            return _purged(parts, namespace, [*kept, agent])
        except DamagedRow as damaged:
            parts.ledger.damage.found(str(damaged))
            repair_rows(parts.ledger, parts.shards, clock())
            return _purged(parts, namespace, [*kept, agent])


def _purged(parts: OpenedStore, namespace: str, agents: Sequence[str]) -> PurgeProof:
    """Purge these agents in one transaction; return the last one's proof."""
    with parts.ledger.transaction() as freed:
        *_, forgotten = [parts.ledger.purge(namespace, each) for each in agents]
    return prove(parts, forgotten, freed)


def agents_of(
    directory: Path,
    fingerprint: str,
    *,
    master: bytes | None = None,
    clock: Callable[[], float] = time.time,
    fs: FileSystem | None = None,
) -> list[SequenceRecord]:
    """Every branch of every agent."""
    with _opened(directory, fingerprint, master, clock, fs or OsFileSystem()) as parts:
        return parts.index.sequences()


@contextmanager
def _claimed(
    directory: Path, fingerprint: str, master: bytes | None, fs: FileSystem
) -> Iterator[tuple[StoreDirectory, Description]]:
    """Lock the store and read its description; StoreError if there is none."""
    path = directory / fingerprint
    if len(fingerprint) != 64 or not path.is_dir():
        raise StoreError(f"there is no store {fingerprint} in {directory}: see which there are with `cache stats`")
    read_description(path, fs)
    place = StoreDirectory.claim(directory, bytes.fromhex(fingerprint), fs, master)
    try:
        yield place, read_description(path, fs, place.keys)
    finally:
        place.release()


@contextmanager
def _opened(
    directory: Path, fingerprint: str, master: bytes | None, clock: Callable[[], float], fs: FileSystem
) -> Iterator[OpenedStore]:
    with _claimed(directory, fingerprint, master, fs) as (place, described):
        parts = open_store(place, described.layout, SHARD_BYTES, fs, clock, described.namespaces)
        try:
            yield parts
        finally:
            parts.close()


def _shards(
    place: StoreDirectory, formats: Sequence[RecordFormat], slots: Sequence[int] | None, fs: FileSystem
) -> Shards:
    is_encrypted = place.keys.data is not None
    return Shards(place.path, formats, slots or [1] * len(formats), fs, are_sealed=is_encrypted)


def _checked(
    place: StoreDirectory, index: Index, described: Description, progress: Progress, fs: FileSystem
) -> CheckReport:
    problem = None
    try:
        check_index(index, described.layout.block_tokens, place.secret)
    except AssertionError as error:
        problem = f"{error}; rebuild it from the records"
    formats = [RecordFormat.of(described.layout, part.index) for part in described.layout.parts]
    with closing(_shards(place, formats, shard_slots(index), fs)) as shards:
        hashes = index.hashes()
        damaged = dict(damaged_blocks(index, shards, hashes, progress))
    lost = shortened_branches(index, damaged.keys())
    return CheckReport(len(hashes), [(digest.hex(), reason) for digest, reason in damaged.items()], lost, problem)
