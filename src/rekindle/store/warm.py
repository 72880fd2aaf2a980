"""The warm tier: blocks and sequences of one model on disk, durable soon after creation, warm after a restart.

Owns the directory: its lock, its secret, one subdirectory per fingerprint, and the threads. Its parts:

    index     hash → slot, sequence → head (ledger: changes to it)      staging  waiting blocks
    shards    slot → bytes              records  bytes → block           writer, readers  the threads

Nothing here raises into a request: damaged, missing or unreadable data counts as missing. Saving runs asynchronously
and never blocks the engine. Any thread may call any method; the blocks of one chain are staged by one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds
from rekindle.config import StoreSettings
from rekindle.spec import Change, KVLayout
from rekindle.store.commands import StoreChange
from rekindle.store.figures import figures
from rekindle.store.files.damage import INDEX_DAMAGE, kind_of, refusal
from rekindle.store.files.description import Description, describe
from rekindle.store.files.directory import StoreDirectory
from rekindle.store.files.shards import SHARD_BYTES, ReadRecords
from rekindle.store.files.sync import FileSystem, OsFileSystem
from rekindle.store.maintenance.check import check_index, damaged_blocks
from rekindle.store.maintenance.opening import OpenedStore, open_store
from rekindle.store.maintenance.purging import finish
from rekindle.store.maintenance.room import OnLost, ignore, text_files_of
from rekindle.store.maintenance.stale import collect_stale
from rekindle.store.rows.schema import agent_key
from rekindle.store.threads.readers import Deliver, Done, Readers, Room
from rekindle.store.threads.staging import StagingBuffer
from rekindle.store.threads.writer import Clock, OnSaved, Writer
from rekindle.store.values import BlockBytes, PurgeProof, SavingBlock, SequenceRecord, StoredBlock, StoreStats, Wear
from rekindle.worker import Worker

__all__ = ["BlockBytes", "PurgeProof", "SavingBlock", "SequenceRecord", "StoreStats", "StoredBlock", "WarmStore"]
logger = logging.getLogger(__name__)
T = TypeVar("T")
NOTHING: Mapping[str, str] = MappingProxyType({})


class WarmStore:
    """The open store of one fingerprint. Create it with `open`, then `start`; `close` saves everything queued.

    `index`, `staging`, `writer` and `readers` are its parts; each documents which threads may call it.
    """

    def __init__(
        self,
        parts: OpenedStore,
        described: Description,
        settings: StoreSettings,
        *,
        clock: Clock,
        disk_bytes: int,
        on_saved: OnSaved,
        on_lost: OnLost,
        read_records: ReadRecords | None,
        computed_from: int | None,
    ) -> None:
        self.secret = parts.place.secret
        parts.ledger.limit_namespaces(settings.namespace_share)
        self._parts = parts
        self._described = described
        self.index = parts.index
        self._clock = clock
        self._block_tokens = parts.shards.formats[0].block_tokens
        self.staging = StagingBuffer(parts.shards.formats, settings.staging_bytes)
        text_files = text_files_of(parts.place.path.parent, settings)
        self.writer = Writer(
            parts,
            self.staging,
            disk_bytes=disk_bytes,
            clock=clock,
            on_saved=on_saved,
            on_lost=on_lost,
            text_files=text_files,
            writes_a_day=settings.disk_writes_a_day,
        )
        self.readers = Readers(parts.shards, settings.readers, self._found_bad, read_records)
        self.closed = False
        self._unsaved_evicted = 0
        self._num_postponed = 0
        self._bad_records = 0
        self._index_trouble = False
        self._computed_from = computed_from

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
        made_from: Mapping[str, str] = NOTHING,
        on_saved: OnSaved = ignore,
        on_lost: OnLost = ignore,
        read_records: ReadRecords | None = None,
        computed_by: int | None = None,
    ) -> WarmStore:
        """Open or create the store of `fingerprint` below `directory`; reads the index, no records.

        StoreLocked if another process has it, StoreError if the directory cannot be used (StoreRefused: the disk is
        full or not writable). A damaged index is set aside and rebuilt from the records, with chains of `namespaces` as
        recovered agents. `made_from`: of the `ModelSpec`. `clock`: wall time. Stores unused for `stale_ttl_s` go.

        The writer calls `on_saved(namespace, agent, branch, num_tokens)` when a turn is durable, and `on_lost(…)` once
        a branch is cut to `num_tokens` by eviction, 0 if it is gone. `read_records`: the kernels' (None: Python loads).
        """
        fs = fs or OsFileSystem()
        place = StoreDirectory.claim(directory, fingerprint, fs, settings.master_key())
        try:
            described = describe(place.path, Description(model, layout, tuple(namespaces), made_from), fs, place.keys)
            parts = open_store(place, layout, shard_bytes, fs, clock, described.namespaces)
            collect_stale(directory, place.path.name, settings.stale_ttl_s, clock=clock, fs=fs)
            return cls(
                parts,
                described,
                settings,
                clock=clock,
                disk_bytes=parts.budget(settings.disk_bytes, fs),
                on_saved=on_saved,
                on_lost=on_lost,
                read_records=read_records,
                computed_from=None if computed_by is None else parts.computed_from(computed_by),
            )
        except OSError as error:
            place.release()
            raise refusal(error, f"the store {place.path} cannot be opened: {error}") from error
        except BaseException:
            place.release()
            raise

    def start(self) -> None:
        """Finish a purge that was cut off, and start the threads."""
        finish(self._parts)
        self.writer.start()
        self.readers.start()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The threads that write and read."""
        return (self.writer.worker, *self.readers.workers)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything queued before is durable or has failed; False on timeout.

        StoreError if the store is closed or its writer has died.
        """
        try:
            self.writer.call(lambda ledger: None).result(timeout_s)
        except FutureTimeout:
            return False
        return True

    def close(self) -> None:
        """Save everything queued, end running loads early, release the directory. Closing twice is safe."""
        if self.closed:
            return
        self.closed = True
        self.readers.stop()
        self.writer.stop()
        self._parts.close()

    def stage(self, block: BlockBytes) -> bool:
        """Copy a block, full or tail, for saving, as `save_blocks`; False if staging is full: try again later."""
        rows = self.staging.take(block.payloads)
        if rows is None:
            return False
        for part, row in rows.items():
            self.staging.payload(part, row)[:] = block.payloads[part]
        self.save_blocks([SavingBlock(block.identity, rows)])
        return True

    def save_blocks(self, blocks: Sequence[SavingBlock]) -> None:
        """Queue blocks whose bytes are in rows of `staging`, or on their way there.

        Parents come before children, and a block's first part before the others, or with them. What is already on disk
        is not written again. One whose parent is not is dropped and counted (`blocks_orphaned`); so is every block once
        the writer has died (`unsaved_evicted`).
        """
        if self.writer.worker.death is None:
            self.writer.put(*blocks)
            return
        for block in blocks:
            self.staging.give_back(block.rows)
            self.skip(block.identity.hash)

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks are saved now: not while the day's budget of writes is used up."""
        return self.writer.writes.may_write

    def postpone(self) -> None:
        """Count a block that is not saved now; the next turn that depends on it queues it again."""
        self._num_postponed += 1

    def skip(self, block_hash: BlockHash) -> None:
        """Count a block that is evicted from memory, or not copied; its descendants will not be saved either."""
        logger.debug("block %s is not saved: it was evicted from memory before, or not copied", block_hash.hex())
        self._unsaved_evicted += 1

    def save_turn(self, turn: SequenceRecord) -> None:
        """Queue a branch's new end, after the blocks staged before it, including its tail.

        To fork, save the same end for another agent; to rewind, save an earlier end. The same transaction frees the old
        tail and blocks that only the old end used. If the head is not on disk by then, the branch stays unchanged
        (`turns_unsaved`).
        """
        self.writer.put(turn)

    def submit(self, change: StoreChange) -> Future[Any]:
        """Queue a change, after everything queued before; return its `done`."""
        self.writer.put(change)
        return change.done

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks of a chain that are on disk or queued; the rest must be staged (again).

        Searches from the end, since a stored block's parents are stored too; cheap for a chain that is stored.
        """
        for count in range(len(hashes), 0, -1):
            if self.writer.is_pending(hashes[count - 1]) or self.contains(hashes[count - 1]):
                return count
        return 0

    def contains(self, block_hash: BlockHash) -> bool:
        """Whether the block is on disk and not known to be damaged."""
        return self.stored(block_hash) is not None

    def parts(self, block_hash: BlockHash) -> frozenset[int]:
        """The parts of a block that are on disk and not known to be damaged."""
        stored = self.stored(block_hash)
        return stored.parts if stored is not None else frozenset()

    def stored(self, block_hash: BlockHash) -> StoredBlock | None:
        """Where a block is stored; None if it is not, or known to be damaged."""
        stored = self._query(lambda: self.index.block(block_hash), None)
        return None if self.writer.is_bad(block_hash) else stored

    def is_own(self, block_hash: BlockHash) -> bool:
        """Whether a block on disk was saved or imported since what computes now does: `computed_by`, a number from 1 up
        for processor, kernels and versions. Without one it never is."""
        first = self._computed_from
        return first is not None and self._query(lambda: self.index.row_of(block_hash), 0) >= first

    def drop(self, block_hash: BlockHash, reason: str) -> None:
        """Remove a block, and all on disk that follows it: none is found from now on, and the writer deletes them."""
        nothing: list[BlockHash] = []
        for each in self._query(lambda: self.index.descendants(block_hash), nothing):
            self.writer.mark_bad(each)
        self._bad_records += 1
        logger.error("block %s is dropped, with what follows it, and will be recomputed: %s", block_hash.hex(), reason)
        self.writer.call(lambda _: self.writer.room.drop(block_hash)).add_done_callback(_report_left)

    def locate(self, hashes: Sequence[BlockHash], *, parent: BlockHash, ids: TokenIds) -> list[StoredBlock]:
        """The leading run of full blocks that are on disk and hold exactly `ids` after `parent`."""
        assert len(ids) == len(hashes) * self._block_tokens, f"{len(hashes)} full blocks of {len(ids)} ids"
        nothing: list[StoredBlock] = []
        found = self._query(lambda: self.index.chain(hashes, parent, ids), nothing)
        for number, block in enumerate(found):
            if self.writer.is_bad(block.identity.hash):
                return found[:number]
        return found

    def child(self, parent: BlockHash, ids: TokenIds) -> tuple[StoredBlock, int] | None:
        """The child of `parent`, full or tail, that shares the most leading ids (at least one), and their count."""
        found = self._query(lambda: self.index.nearest_child(parent, ids), None)
        return None if found is None or self.writer.is_bad(found[0].identity.hash) else found

    def load(self, blocks: Sequence[StoredBlock], deliver: Deliver, done: Done, room: Room | None = None) -> None:
        """Read the given parts of blocks on the reader threads, then call `done(num_good)`, once.

        A run of them from the i-th on is read to where `room(i, blocks)` has the payloads [payload_bytes] of their
        parts, without it to new memory; `deliver(i, payloads)` gets the leading intact ones, of several runs in any
        order. The first `num_good` blocks are intact and have the expected ids; later ones may have been delivered.
        """
        self.readers.put(blocks, deliver, done, room)

    def chain_to(self, head: BlockHash, most: int) -> list[BlockIdentity]:
        """The chain of blocks on disk that ends in `head`, in order, at most `most` of them; empty if `head` is not
        there. It begins after the last one that is missing, or known to be damaged."""
        nothing: list[BlockIdentity] = []
        found = self._query(lambda: self.index.chain_to(head, most), nothing)
        good = list(takewhile(lambda block: not self.writer.is_bad(block.hash), reversed(found)))
        return good[::-1]

    def sequences(self) -> list[SequenceRecord]:
        """Every branch of every agent, without token ids."""
        return self._query(self.index.sequences, [])

    def sequences_of(self, namespace: str, agent: str) -> list[SequenceRecord]:
        """Every branch of one agent, without token ids."""
        key = agent_key(namespace, agent, self.secret)
        return self._query(lambda: self.index.sequences(key), [])

    def sequence_ids(self, record: SequenceRecord) -> TokenIds:
        """The token ids of a branch [num_tokens]; empty if its blocks were removed in the meantime."""
        ids = self._query(lambda: self.index.ids(record, self._block_tokens), None)
        return np.empty(0, dtype=np.uint32) if ids is None else ids

    def has_lost(self, record: SequenceRecord) -> bool:
        """Whether the index shows that blocks of the branch are gone; False if it cannot be read."""
        return self._query(lambda: self.index.ids(record, self._block_tokens) is None, False)

    def known_elsewhere(self, namespace: str, agent: str) -> tuple[Change, ...] | None:
        """What differs in another store of this directory that has the agent, whose blocks this model cannot use.

        None if no other has it; empty if it does not say what it was made from.
        """
        return self._parts.others.changes(agent_key(namespace, agent, self.secret), self._described)

    def touch(self, namespace: str, agent: str, branch: int, last_use: float) -> None:
        """Record that a branch was used without a change. Free: made durable with the next save, command or close.

        A time in the future counts as now; an unknown branch is ignored.
        """
        self.writer.touch((namespace, agent, branch), last_use)

    def pins(self) -> dict[tuple[str, str], float]:
        """(namespace, agent) -> pin expiry, for agents pinned now."""
        return self._query(lambda: self.index.pins(self._clock()), {})

    def stats(self) -> StoreStats:
        """Current figures; counters since `open`. Costs a walk along the chains of pinned agents."""
        return figures(
            self.writer,
            self.readers,
            num_known=self._query(self.index.counts, (0, 0)),
            num_pinned=self._query(lambda: self.index.num_pinned_blocks(self._clock()), 0),
            index_bytes=self.index.num_bytes,
            unsaved_evicted=self._unsaved_evicted,
            num_postponed=self._num_postponed,
            bad_records=self._bad_records,
            damage=self.index.damage,
        )

    def wear(self) -> Wear:
        """What was written to the disk. Costs nothing."""
        writes, turns = self.writer.writes, self.writer.counts["turns_saved"]
        return Wear(writes.today, writes.most, writes.num_counted // turns if turns else None)

    def check(self, records: Literal["index", "records"] = "index") -> None:
        """Assert that the index is consistent, with "records" also every record; nothing may be queued."""
        self.staging.check()
        check_index(self.index, self._block_tokens, self.secret)
        self.writer.check(self.index)
        if records == "records":
            found = damaged_blocks(self.index, self._parts.shards, self.index.hashes(), lambda done, total: None)
            damaged = [f"{block_hash.hex()}: {reason}" for block_hash, reason in found]
            assert not damaged, f"{len(damaged)} damaged blocks, first: {damaged[0]}"

    def _found_bad(self, block: StoredBlock, reason: str) -> None:
        """Mark a block whose record did not verify as damaged, unless it has only moved in the meantime."""
        block_hash = block.identity.hash
        now = self._query(lambda: self.index.block(block_hash), None)
        if now is None or not set(block.places) <= set(now.places) or self.writer.is_bad(block_hash):
            return
        self._bad_records += 1
        self.writer.mark_bad(block_hash)
        logger.warning("block %s is damaged on disk and will be recomputed: %s", block_hash.hex(), reason)

    def _query(self, query: Callable[[], T], otherwise: T) -> T:
        """Return the index's answer, or `otherwise` if it cannot be read (logged once) or the store is closed."""
        try:
            return query()
        except INDEX_DAMAGE as error:
            if kind_of(error) == "file":
                self.index.damage.broken(error)
            elif kind_of(error) == "rows":
                self.index.damage.found(str(error))
            elif not self._index_trouble and not self.closed:
                logger.error("the store's index cannot be read, its content counts as missing: %s", error)
                self._index_trouble = True
            return otherwise


def _report_left(dropped: Future[None]) -> None:
    """Log that a block which differs could not be deleted."""
    if (error := dropped.exception()) is not None:
        logger.error("a block that differs stays on disk, and is found again after a restart: %s", error)
