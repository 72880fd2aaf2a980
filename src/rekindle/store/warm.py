"""The warm tier: blocks and sequences of one model on disk, durable soon after they are made, warm after a restart.

Owns the directory: its lock, its secret, one sub-directory per fingerprint, and the threads. Who knows what inside:

    index     name → slot, sequence → head (ledger: changes of it)      staging  blocks that wait
    shards    slot → bytes              records  bytes → block           writer, readers  the threads

Nothing here raises into a request: what is damaged, missing or cannot be read counts as "not there". Saving runs behind
the engine and never holds it up. Any thread may call any method, except that blocks are staged by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, TokenIds
from rekindle.config import RESPONSES_FILE, SESSIONS_FILE, StoreSettings
from rekindle.spec import KVLayout
from rekindle.store.check import check_index, damaged_blocks
from rekindle.store.damage import INDEX_DAMAGE, kind_of
from rekindle.store.description import Description, describe
from rekindle.store.directory import StoreDirectory
from rekindle.store.figures import figures
from rekindle.store.opening import OpenedStore, open_store
from rekindle.store.purging import prove
from rekindle.store.readers import Deliver, Done, Readers
from rekindle.store.refusal import refusal
from rekindle.store.room import OnLost
from rekindle.store.shards import SHARD_BYTES
from rekindle.store.siblings import known_to_sibling
from rekindle.store.staging import StagingBuffer
from rekindle.store.stale import collect_stale
from rekindle.store.sync import FileSystem, OsFileSystem
from rekindle.store.values import PurgeProof, SequenceRecord, StagedBlock, StoredBlock, StoreStats
from rekindle.store.writer import Clock, OnSaved, Writer
from rekindle.worker import Worker

__all__ = ["PurgeProof", "SequenceRecord", "StagedBlock", "StoreStats", "StoredBlock", "WarmStore"]
logger = logging.getLogger(__name__)
T = TypeVar("T")


class WarmStore:
    """The open store of one fingerprint. Make it with `open`, then `start`; `close` saves all that waits.

    `index`, `staging`, `writer` and `readers` are its parts, each with the threads it may be called from.
    """

    def __init__(self, parts: OpenedStore, settings: StoreSettings, clock: Clock, disk_bytes: int) -> None:
        self.secret = parts.place.secret
        self._parts = parts
        self.index = parts.index
        self._clock = clock
        self._block_tokens = parts.shards.formats[0].block_tokens
        self.staging = StagingBuffer(parts.shards.formats, settings.staging_bytes)
        words = _words(parts.place.path.parent, settings)
        self.writer = Writer(parts.ledger, parts.shards, self.staging, disk_bytes=disk_bytes, clock=clock, words=words)
        self.readers = Readers(parts.shards, settings.readers, self._found_bad)
        self.closed = False
        self._unsaved_evicted = 0
        self._bad_records = 0
        self._index_trouble = False

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        fingerprint: bytes,
        layout: KVLayout,
        settings: StoreSettings,
        fs: FileSystem | None = None,
        clock: Clock = time.time,
        shard_bytes: int = SHARD_BYTES,
        model: str = "",
        namespaces: Sequence[str] = ("default",),
    ) -> WarmStore:
        """Open or make the store of `fingerprint` below `directory`; reads the sequences' index, no records.

        StoreLocked if another process has it, StoreError if the directory cannot be used (StoreRefused: because the
        disk is full or may not be written). A damaged index is set aside
        and made anew from the records, chains of `namespaces` as recovered agents. `clock` is wall time.
        Stores beside it that were not used for `stale_ttl_s` are removed.
        """
        fs = fs or OsFileSystem()
        place = StoreDirectory.claim(directory, fingerprint, fs)
        try:
            described = describe(place.path, Description(model, layout, tuple(namespaces)), fs)
            parts = open_store(place, layout, shard_bytes, fs, clock, described.namespaces)
            parts.ledger.limit_namespaces(settings.namespace_share)
            collect_stale(directory, place.path.name, settings.stale_ttl_s, now=clock(), fs=fs)
            return cls(parts, settings, clock, parts.budget(settings.disk_bytes, fs))
        except OSError as error:
            place.release()
            raise refusal(error, f"the store {place.path} cannot be opened: {error}") from error
        except BaseException:
            place.release()
            raise

    @property
    def on_saved(self) -> OnSaved:
        """Called by the writer as `on_saved(namespace, agent, branch, num_tokens)` when a turn is durable."""
        return self.writer.on_saved

    @on_saved.setter
    def on_saved(self, call: OnSaved) -> None:
        self.writer.on_saved = call

    @property
    def on_lost(self) -> OnLost:
        """Called by the writer as `on_lost(namespace, agent, branch, num_tokens)` when eviction has shortened a branch.

        `num_tokens` of it are durable still, 0 when it is gone; the transaction has returned.
        """
        return self.writer.room.on_lost

    @on_lost.setter
    def on_lost(self, call: OnLost) -> None:
        self.writer.room.on_lost = call

    def start(self) -> None:
        """Start the threads."""
        self.writer.start()
        self.readers.start()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The threads that write and read."""
        return (self.writer.worker, *self.readers.workers)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all ordered before is durable or has failed; False if that took too long.

        StoreError where the store is closed, or its writer has died.
        """
        try:
            self.writer.order(lambda ledger: None).result(timeout_s)
        except FutureTimeout:
            return False
        return True

    def close(self) -> None:
        """Save what waits, end loads under way with what they have, let the directory go. Closing twice is safe."""
        if self.closed:
            return
        self.closed = True
        self.readers.stop()
        self.writer.stop()
        self._parts.close()

    def stage(self, block: StagedBlock) -> bool:
        """Copy a block, full or tail, to be saved; False if there is no room now: offer it again later.

        Parents come before children. A block that is on disk already is not written again; one whose parent is not
        there is dropped and counted (`blocks_orphaned`), and so is any where the writer has died (`unsaved_evicted`).
        """
        if self.writer.worker.death is not None:
            self.skip(block.identity.hash)
            return True
        waiting = self.staging.take(block)
        if waiting is None:
            return False
        self.writer.put(waiting)
        return True

    def skip(self, name: BlockHash) -> None:
        """Count a block that left memory before it could be staged; what stands on it will not be saved."""
        logger.debug("block %s was evicted before it was saved", name.hex())
        self._unsaved_evicted += 1

    def save_turn(self, turn: SequenceRecord) -> None:
        """Queue a branch's new end, behind the blocks staged before, its tail among them.

        Forking is saving the same end for another agent, rewinding is saving an earlier one. Its old tail, and blocks
        that only its old end used, are freed by the same transaction. Where the head is not on disk by then the branch
        stays as it was (`turns_unsaved`).
        """
        self.writer.put(turn)

    def move(self, turns: Sequence[SequenceRecord]) -> Future[bool]:
        """Let branches end where these say, after all that was queued before: all in one transaction.

        True once durable; False, and nothing has changed, where a head is not on disk. StoreError in the future of a
        closed store, SQLite's and the system's errors where the disk refuses.
        """
        return self.writer.move(turns)

    def num_known(self, names: Sequence[BlockHash]) -> int:
        """How many leading blocks of a chain are on disk or queued: what comes after is to be staged (again).

        Asks from the end, as whatever is there has its parents there, so it is cheap for a chain that is there.
        """
        for count in range(len(names), 0, -1):
            if self.writer.is_pending(names[count - 1]) or self.contains(names[count - 1]):
                return count
        return 0

    def contains(self, name: BlockHash) -> bool:
        """Whether the block is on disk, whole as far as is known."""
        stored = self._ask(lambda: self.index.block(name), None)
        return stored is not None and not self.writer.is_bad(name)

    def locate(self, names: Sequence[BlockHash], *, parent: BlockHash, ids: TokenIds) -> list[StoredBlock]:
        """The leading run of full blocks that are on disk, with all parts, and hold exactly `ids` after `parent`."""
        assert len(ids) == len(names) * self._block_tokens, f"{len(names)} full blocks of {len(ids)} ids"
        nothing: list[StoredBlock] = []
        found = self._ask(lambda: self.index.chain(names, parent, ids), nothing)
        for number, block in enumerate(found):
            if self.writer.is_bad(block.identity.hash):
                return found[:number]
        return found

    def child(self, parent: BlockHash, ids: TokenIds) -> tuple[StoredBlock, int] | None:
        """The block after `parent`, full or tail, that shares the most leading ids, at least one, with how many."""
        found = self._ask(lambda: self.index.nearest_child(parent, ids), None)
        return None if found is None or self.writer.is_bad(found[0].identity.hash) else found

    def load(self, blocks: Sequence[StoredBlock], deliver: Deliver, done: Done) -> None:
        """Read blocks on a reader thread: `deliver(i, part, payload)` for each in order, then `done(num_good)`, once.

        Only what is whole, and holds the ids it should, is delivered; the first that is not ends the load.
        `payload` [payload_bytes] is valid only during the call.
        """
        self.readers.put(blocks, deliver, done)

    def sequences(self) -> list[SequenceRecord]:
        """Every branch of every agent, without ids."""
        return self._ask(self.index.sequences, [])

    def sequence_ids(self, record: SequenceRecord) -> TokenIds:
        """The token ids of a branch [num_tokens]; none if its blocks have gone since."""
        ids = self._ask(lambda: self.index.ids(record, self._block_tokens), None)
        return np.empty(0, dtype=np.uint32) if ids is None else ids

    def has_lost(self, record: SequenceRecord) -> bool:
        """Whether the index was read and blocks of the branch are gone; False where it could not be read."""
        return self._ask(lambda: self.index.ids(record, self._block_tokens) is None, False)

    def known_elsewhere(self, namespace: str, agent: str) -> bool:
        """Whether another model's store in the same directory knows the agent, so that its memory is of no use here."""
        return known_to_sibling(self._parts.place.path, namespace, agent, self.secret)

    def delete(self, namespace: str, agent: str, branch: int | None = None) -> Future[int]:
        """Forget a branch (or all of an agent) and what only it used; the number of slots freed, once durable."""
        return self.writer.order(lambda ledger: ledger.delete(namespace, agent, branch))

    def touch(self, namespace: str, agent: str, branch: int, last_use: float) -> None:
        """Note that a branch was used without being changed. Durable with the next save, order or close: costs nothing.

        One that lies in the future counts as now; a branch that is not there is passed over.
        """
        self.writer.touch((namespace, agent, branch), last_use)

    def pin(self, namespace: str, agent: str, until: float) -> Future[bool]:
        """Keep all of an agent's blocks on disk until that wall time (`math.inf`: for ever; 0.0: no longer).

        Queued behind what was saved before; True once durable, False if the agent is not on disk. A pin ends with its
        agent.
        """
        return self.writer.order(lambda ledger: ledger.pin(namespace, agent, until))

    def pins(self) -> dict[tuple[str, str], float]:
        """(namespace, agent) -> until, of those pinned now."""
        return self._ask(lambda: self.index.pins(self._clock()), {})

    def purge(self, namespace: str, agent: str) -> Future[PurgeProof]:
        """Forget an agent and wipe what only it used: log emptied, holes punched, all unused slots read back as zeros.

        Covers what was staged before; blocks no sequence stands on go as well, they may be the agent's. End its
        requests first: what they stage later is saved as anybody's. PurgeUnproved in the future when a slot does not
        read as zeros; the agent is forgotten then, and purging it again proves again.
        """
        parts = self._parts
        return self.writer.order(
            lambda ledger: ledger.purge(namespace, agent), lambda forgotten, freed: prove(parts, forgotten, freed)
        )

    def stats(self) -> StoreStats:
        """Figures; counters since `open`. Costs a walk along the chains of pinned agents."""
        return figures(
            self.writer,
            self.readers,
            num_known=self._ask(self.index.counts, (0, 0)),
            num_pinned=self._ask(lambda: self.index.num_pinned_blocks(self._clock()), 0),
            index_bytes=self.index.num_bytes,
            unsaved_evicted=self._unsaved_evicted,
            bad_records=self._bad_records,
            damage=self.index.damage,
        )

    def check(self, records: Literal["index", "records"] = "index") -> None:
        """Assert that everything on disk agrees, with "records" also every record; for a store with nothing queued."""
        self.staging.check()
        check_index(self.index, self._block_tokens, self.secret)
        self.writer.check(self.index)
        if records == "records":
            found = damaged_blocks(self.index, self._parts.shards, self.index.names(), lambda done, total: None)
            damaged = [f"{name.hex()}: {reason}" for name, reason in found]
            assert not damaged, f"{len(damaged)} damaged blocks, first: {damaged[0]}"

    def _found_bad(self, block: StoredBlock, reason: str) -> None:
        """A record did not verify: if the block still lies there it is damaged, else it only moved meanwhile."""
        name = block.identity.hash
        now = self._ask(lambda: self.index.block(name), None)
        if now is None or now.slots != block.slots or self.writer.is_bad(name):
            return
        self._bad_records += 1
        self.writer.mark_bad(name)
        logger.warning("block %s is damaged on disk and will be computed again: %s", name.hex(), reason)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """The index's answer; where it cannot be read, `otherwise`, said once. A closed store has no answer."""
        try:
            return question()
        except INDEX_DAMAGE as error:
            if kind_of(error) == "file":
                self.index.damage.broken(error)
            elif kind_of(error) == "rows":
                self.index.damage.found(str(error))
            elif not self._index_trouble and not self.closed:
                logger.error("the store's index cannot be read, what it names counts as not there: %s", error)
                self._index_trouble = True
            return otherwise


def _words(directory: Path, settings: StoreSettings) -> tuple[Path, ...]:
    """The files that share the disk budget of a store below `directory`; they may be missing."""
    is_usual = directory == settings.directory()
    sessions = settings.sessions_path() if is_usual else None
    return directory / RESPONSES_FILE, sessions or directory / SESSIONS_FILE
