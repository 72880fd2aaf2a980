"""The writer thread: makes queued items durable, always in this order.

    make room: an eviction transaction  →  `on_lost`, holes
    records to free slots  →  shards synced  →  one transaction: rows, slots, sequences  →  `on_saved`, holes

So no row ever refers to bytes that are not durable, and a slot is reused only after the transaction that freed it. The
records never take more than `disk_bytes`: room for a batch is made before it is written. While the day's budget of
writes is used up no batch is written, changes are.
Owns the queue and the figures of saving. Queued items are processed in batches and in order. A block is written only if
its parent is on disk (or in the same batch), a sequence moved only if its head is. A failing batch is dropped, logged
once and counted; none of it becomes visible, and the thread continues. If the thread itself dies, commands are refused
at once, and queued blocks and turns are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.errors import StoreError
from rekindle.store.commands import Delete, Move, Pin, Purge, StoreChange, failure
from rekindle.store.files.damage import kind_of
from rekindle.store.maintenance.opening import OpenedStore
from rekindle.store.maintenance.purging import prove
from rekindle.store.maintenance.room import DiskRoom, OnLost
from rekindle.store.maintenance.wear import DiskWrites
from rekindle.store.rows.index import Index
from rekindle.store.rows.ledger import BranchKey, Ledger
from rekindle.store.threads.batch import Batch
from rekindle.store.threads.staging import StagingBuffer
from rekindle.store.threads.trouble import SaveTrouble
from rekindle.store.values import SavingBlock, SequenceRecord, StoredBlock
from rekindle.worker import Death, Worker, fail, failure_of, fulfil

logger = logging.getLogger(__name__)

T = TypeVar("T")
GATHER_S = 0.5  # for which blocks wait for the turn that needs them
OnSaved = Callable[[str, str, int, int], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Something to run on the thread, alone between batches like a change."""

    run: Callable[[Ledger], Any]
    done: Future[Any]


Item = SavingBlock | SequenceRecord | StoreChange | _Call | Literal["stop"]


class Writer:
    """Saves blocks and sequences. Once started, only its thread calls the ledger and writes shards."""

    def __init__(
        self,
        parts: OpenedStore,
        staging: StagingBuffer,
        *,
        disk_bytes: int,
        clock: Clock,
        on_saved: OnSaved,
        on_lost: OnLost,
        text_files: Sequence[Path] = (),
        writes_a_day: int | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.trouble = SaveTrouble()
        self.room = DiskRoom(
            parts.ledger,
            parts.shards,
            parts.others,
            disk_bytes=disk_bytes,
            counts=self.counts,
            on_lost=on_lost,
            text_files=text_files,
        )
        self.writes = DiskWrites(parts, most=writes_a_day, clock=clock)
        self._on_saved = on_saved
        self._parts = parts
        self._ledger = parts.ledger
        self._shards = parts.shards
        self._staging = staging
        self._clock = clock
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._pending: Counter[BlockHash] = Counter()
        self._bad: set[BlockHash] = set()
        self._touched: dict[BranchKey, float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.worker = Worker("store-writer", self._run, on_death=self._died)

    def start(self) -> None:
        """Start the thread."""
        self.worker.start()

    def stop(self) -> None:
        """Save everything queued, then end the thread, unless it has died; later commands are refused."""
        self.call(lambda ledger: self.writes.keep())
        self._queue.put("stop")
        self.worker.join()
        self._ended.set()
        self._refuse_rest("the store is closed")

    def _died(self, death: Death) -> None:
        self.trouble.failed(StoreError(str(death)), self._clock())
        self._refuse_rest(death.summary)

    def _refuse_rest(self, why: str) -> None:
        """Fail or drop items queued too late, so that no caller waits forever. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, StoreChange):
                    fail(item.done, failure(item, StoreError(why)))
                elif isinstance(item, _Call):
                    fail(item.done, StoreError(why))
                elif isinstance(item, SavingBlock):
                    self._free_staged([item])
                elif isinstance(item, SequenceRecord):
                    self.counts["turns_unsaved"] += 1

    def put(self, *items: SavingBlock | SequenceRecord | StoreChange | _Call) -> None:
        """Queue blocks, moved sequences and changes; dropped, or refused, if the thread has ended."""
        with self._lock:
            self._pending.update(
                item.identity.hash for item in items if isinstance(item, SavingBlock) and 0 in item.rows
            )
        for item in items:
            self._queue.put(item)
        if self.worker.death is not None:
            self._refuse_rest(self.worker.death.summary)
        elif self._ended.is_set():
            self._refuse_rest("the store is closed")

    def call(self, run: Callable[[Ledger], T]) -> Future[T]:
        """Run a function on the thread, after everything queued before; StoreError if the thread has ended."""
        future: Future[T] = Future()
        self.put(_Call(run, future))
        return future

    def touch(self, branch: BranchKey, last_use: float) -> None:
        """Record a use of a branch, written with the next transaction."""
        with self._lock:
            self._touched[branch] = last_use

    def is_pending(self, block_hash: BlockHash) -> bool:
        """Whether the block's first part is queued and not yet on disk."""
        with self._lock:
            return block_hash in self._pending

    def is_bad(self, block_hash: BlockHash) -> bool:
        """Whether a record of the block was found damaged; it counts as missing until it is saved again."""
        return block_hash in self._bad

    def mark_bad(self, block_hash: BlockHash) -> None:
        """Treat the block as not on disk."""
        with self._lock:
            self._bad.add(block_hash)

    @property
    def queue_length(self) -> int:
        """Number of queued items."""
        return self._queue.qsize()

    @property
    def num_blocks(self) -> int:
        """Blocks on disk."""
        return self._ledger.slots.num_used(0)

    def check(self, index: Index) -> None:
        """Assert that slot counts and the eviction order agree with the index."""
        if self.worker.is_alive:
            self.call(lambda ledger: ledger.check()).result()
        marks = index.meta()
        for part in range(index.num_parts):
            kept, stored = self._ledger.slots.num_slots[part], marks.get(f"num_slots.{part}", 0)
            assert kept == stored, f"part {part}: {kept} slots in memory, {stored} in the index"
            with index.reading() as connection:
                free = connection.execute("SELECT COUNT(*) FROM free WHERE part = ?", (part,)).fetchone()[0]
            kept = self._ledger.slots.num_free[part]
            assert kept == free, f"part {part}: {kept} free slots in memory, {free} in the index"

    def _run(self) -> None:
        self._shrink()
        while True:
            batch, after = self._collect()
            try:
                if batch:
                    self._save_or_report(Batch.of(batch))
            except BaseException:
                if isinstance(after, StoreChange | _Call):
                    self._queue.put(after)  # the thread dies: refused with the remaining items
                raise
            if isinstance(after, StoreChange | _Call):
                fulfil(after.done, partial(self._answer, after))
            elif after == "stop":
                return

    def _shrink(self) -> None:
        """Evict down to the budget, which may have been reduced since the last run."""
        try:
            self._repaired(lambda: self.room.make(0, tuple, {}, self._clock()))
        except BaseException as error:
            self.trouble.failed(error, self._clock())

    def _collect(self) -> tuple[list[SavingBlock | SequenceRecord], StoreChange | _Call | Literal["stop", "wait"]]:
        """Take queued items up to the next command, and the command; blocks while the queue is empty.

        Blocks wait a little for the turn that needs them, as long as staging has room: one transaction writes less.
        """
        batch: list[SavingBlock | SequenceRecord] = []
        item, until = self._queue.get(), time.monotonic() + GATHER_S
        while isinstance(item, SavingBlock | SequenceRecord):
            batch.append(item)
            if isinstance(item, SequenceRecord) or self._staging.is_half_full:
                until = 0.0
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return batch, "wait"
        return batch, item

    def _save_or_report(self, batch: Batch) -> None:
        try:
            for block in batch.blocks:
                block.wait()
            self._repaired(lambda: self._save(batch))
        except BaseException as error:
            # Border: a failed save is lost at the next restart, but the thread continues.
            self.counts["failed_saves"] += 1
            self.counts["turns_unsaved"] += len(batch.turns)
            self.trouble.failed(error, self._clock())
        finally:
            self._free_staged(batch.blocks)

    def _free_staged(self, blocks: Sequence[SavingBlock]) -> None:
        for block in blocks:
            self._staging.give_back(block.rows)
        with self._lock:
            self._pending -= Counter(block.identity.hash for block in blocks if 0 in block.rows)

    def _save(self, batch: Batch) -> None:
        if not self.writes.may_write:
            self._postpone(len(batch.wanted(self._ledger, self.is_bad)[0]))
            self._report_turns(batch.turns, ())
            return
        now, touched = self._clock(), self._take_touched()
        rows = self._write(self._accept(batch, touched, now))
        self._shards.sync()
        with self._ledger.transaction() as freed:
            self._ledger.add(rows, now, damaged=self._bad)
            saved = [turn for turn in batch.turns if turn.head == turn.root or self._known(turn.head, rows)]
            self._ledger.move(saved)
            self._ledger.touch(touched, now)
            self.writes.keep()
        with self._lock:
            self._bad -= {row.identity.hash for row in rows if 0 in row.parts}
        if rows or saved:
            self.trouble.recovered()
        self.counts["blocks_written"] += len(rows)
        self.writes.count()
        self._report_turns(batch.turns, saved)
        self.room.give_back(freed)

    def _report_turns(self, turns: Sequence[SequenceRecord], saved: Sequence[SequenceRecord]) -> None:
        """Count these turns; those that are durable now are reported."""
        self.counts["turns_saved"] += len(saved)
        self.counts["turns_unsaved"] += len(turns) - len(saved)
        for turn in saved:
            self._on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)

    def _take_touched(self) -> dict[BranchKey, float]:
        with self._lock:
            touched, self._touched = self._touched, {}
        return touched

    def _known(self, block_hash: BlockHash, rows: Sequence[StoredBlock]) -> bool:
        """Whether sequences may end in this block."""
        is_new = any(row.identity.hash == block_hash for row in rows)
        return is_new or (self._ledger.has(block_hash) and not self.is_bad(block_hash))

    def _accept(self, batch: Batch, touched: Mapping[BranchKey, float], now: float) -> list[SavingBlock]:
        """The new parts of blocks, as far as the day's budget allows, and there is room or room can be made."""
        wanted, num_orphaned = batch.wanted(self._ledger, self.is_bad)
        self.counts["blocks_orphaned"] += num_orphaned
        fitting = wanted[: self.writes.num_fitting(map(self._record_bytes, wanted))]
        if len(fitting) < len(wanted):
            self._postpone(len(wanted) - len(fitting))
        num_accepted = self.room.make(len(fitting), partial(batch.needed, self._ledger), touched, now)
        self.counts["blocks_refused"] += len(fitting) - num_accepted
        return fitting[:num_accepted]

    def _record_bytes(self, block: SavingBlock) -> int:
        return sum(self._shards.formats[part].record_bytes for part in block.rows)

    def _postpone(self, num_blocks: int) -> None:
        """Count and report blocks that are not written because the day's budget of writes is used up."""
        self.counts["blocks_postponed"] += num_blocks
        self.writes.report_used_up()

    def _write(self, blocks: Sequence[SavingBlock]) -> list[StoredBlock]:
        """Write the records to free slots; nothing refers to them yet."""
        counts = Counter(part for block in blocks for part in block.rows)
        slots = {f.part: iter(self._ledger.slots.next(f.part, counts[f.part])) for f in self._shards.formats}
        rows = []
        for block in blocks:
            places = []
            for part, row in sorted(block.rows.items()):
                record = self._staging.record(part, row)
                places.append(self._shards.put(block.identity, part, next(slots[part]), record))
            rows.append(StoredBlock(block.identity, tuple(places)))
        return rows

    def _answer(self, command: StoreChange | _Call) -> Any:
        try:
            return self._repaired(lambda: self._carry_out(command))
        except BaseException as error:
            # Border: the caller of a change gets its error, even a panic, with what to do.
            if isinstance(command, _Call):
                raise
            raise failure(command, failure_of(error)) from error

    def _carry_out(self, command: StoreChange | _Call) -> Any:
        """Make a change durable; return its result."""
        touched = self._take_touched()
        with self._ledger.transaction() as freed:
            self._ledger.touch(touched, self._clock())
            answer = self._change(command)
        self.room.give_back(freed)
        if freed:
            self.room.forget_full()
        if isinstance(command, Purge):
            answer = prove(self._parts, answer, freed)
        self.writes.count()
        if isinstance(command, Move):
            self._report_turns(command.records, command.records if answer else ())
        return answer

    def _change(self, command: StoreChange | _Call) -> Any:
        """Change the ledger, in the current transaction."""
        match command:
            case Delete():
                return self._ledger.delete(command.namespace, command.agent, command.branch)
            case Purge():
                return self._ledger.purge(command.namespace, command.agent)
            case Pin():
                return self._ledger.pin(command.namespace, command.agent, command.until)
            case Move():
                is_known = all(self._known(record.head, ()) for record in command.records)
                if is_known:
                    self._ledger.move(command.records)
                return is_known
            case _Call():
                return command.run(self._ledger)

    def _repaired(self, work: Callable[[], T]) -> T:
        """Run `work` after repairing known damaged rows; if it meets more, repair and run it once more."""
        if self._ledger.damage.is_due:
            self._repair()
        try:
            return work()
        except Exception as error:
            if kind_of(error) == "file":
                self._ledger.damage.broken(error)
            if kind_of(error) != "rows" or not self._repair():
                raise
        return work()

    def _repair(self) -> bool:
        """Repair the index's rows; False on failure."""
        try:
            with self._ledger.transaction() as freed:
                done = self._ledger.repair(self._shards, self._clock())
        except Exception as error:
            if kind_of(error) == "other":
                self.trouble.failed(error, self._clock())
            else:
                self._ledger.damage.broken(error)
            return False
        logger.warning("the store's index was repaired: %s", done.summary())
        for branch in done.lost:
            self.room.on_lost(branch.namespace, branch.agent, branch.branch, 0)
        self.room.give_back(freed)
        return True
