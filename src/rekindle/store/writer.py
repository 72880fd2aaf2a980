"""The writer thread: what waits becomes durable, in this order and no other.

    room made: a transaction for what must leave  →  `on_lost`, holes
    records to free slots  →  shards synced  →  one transaction: rows, slots, sequences  →  `on_saved`, holes

So no row ever names bytes that were not durable, and a slot is written again only after the transaction that freed it.
The records never take more than `disk_bytes`: what a batch needs leaves before it is written.
Owns the queue and the figures of saving. What waits is taken in batches; the order in which it was queued is kept. A
block is written only if its parent is on disk (or in the same batch), a sequence moved only if its head is. A failing
batch is dropped, said once and counted; nothing of it is visible, and the thread goes on. If the thread itself dies,
orders are refused at once, and what is to be saved is dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.errors import StoreError
from rekindle.kv.payload import BlockPayload
from rekindle.store.damage import kind_of
from rekindle.store.index import Index
from rekindle.store.ledger import BranchKey, Ledger
from rekindle.store.room import DiskRoom, nobody
from rekindle.store.shards import Shards
from rekindle.store.slots import Slot
from rekindle.store.staging import StagingBuffer, WaitingBlock
from rekindle.store.trouble import SaveTrouble
from rekindle.store.values import SequenceRecord, StoredBlock
from rekindle.worker import Death, Worker, fail, fulfil

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnSaved = Callable[[str, str, int, int], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False)
class StoreChange:
    """A change of the index that is not a save: done alone, between batches; its answer goes to `future`.

    `then` makes that answer of what `change` returned and the slots it freed, once they are durable and punched.
    """

    change: Callable[[Ledger], Any]
    then: Callable[[Any, Sequence[Slot]], Any]
    future: Future[Any]


Item = WaitingBlock | SequenceRecord | StoreChange | Literal["stop"]


class Writer:
    """Saves blocks and sequences. Only its thread calls the ledger and writes shards once it runs."""

    def __init__(
        self,
        ledger: Ledger,
        shards: Shards,
        staging: StagingBuffer,
        *,
        disk_bytes: int,
        clock: Clock,
        words: Sequence[Path] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.trouble = SaveTrouble()
        self.room = DiskRoom(ledger, shards, disk_bytes=disk_bytes, counts=self.counts, words=words)
        self.on_saved: OnSaved = nobody
        self._ledger = ledger
        self._shards = shards
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
        """Begin to save what waits."""
        self.worker.start()

    def stop(self) -> None:
        """Save all that waits, then end the thread, unless it has died; what is ordered later is refused."""
        self.order(lambda ledger: None)
        self._queue.put("stop")
        self.worker.join()
        self._ended.set()
        self._refuse_rest("the store is closed")

    def _died(self, death: Death) -> None:
        self.trouble.failed(StoreError(str(death)), self._clock())
        self._refuse_rest(death.summary)

    def _refuse_rest(self, why: str) -> None:
        """Answer what comes too late, so that nobody waits forever. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, StoreChange):
                    fail(item.future, StoreError(why))
                elif isinstance(item, WaitingBlock):
                    self._let_go([item])
                elif isinstance(item, SequenceRecord):
                    self.counts["turns_unsaved"] += 1

    def put(self, item: WaitingBlock | SequenceRecord) -> None:
        """Queue a block or a moved sequence; dropped where there is no thread any more."""
        if isinstance(item, WaitingBlock):
            with self._lock:
                self._pending[item.identity.hash] += 1
        self._put(item)

    def _put(self, item: Item) -> None:
        self._queue.put(item)
        if self.worker.death is not None:
            self._refuse_rest(self.worker.death.summary)
        elif self._ended.is_set():
            self._refuse_rest("the store is closed")

    def order(
        self, change: Callable[[Ledger], Any], then: Callable[[Any, Sequence[Slot]], Any] = lambda answer, freed: answer
    ) -> Future[Any]:
        """Queue a change of the index, after all that was queued before; StoreError in the future of a closed store."""
        future: Future[Any] = Future()
        self._put(StoreChange(change, then, future))
        return future

    def move(self, turns: Sequence[SequenceRecord]) -> Future[bool]:
        """Order that sequences end elsewhere: all of them, or none where a head is not on disk."""

        def change(ledger: Ledger) -> bool:
            is_known = all(self._known(turn.head, ()) for turn in turns)
            if is_known:
                ledger.move(turns)
            return is_known

        def moved(is_known: bool, freed: Sequence[Slot]) -> bool:
            self.counts["turns_saved" if is_known else "turns_unsaved"] += len(turns)
            for turn in turns if is_known else ():
                self.on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)
            return is_known

        return self.order(change, moved)

    def touch(self, branch: BranchKey, last_use: float) -> None:
        """Note a use of a branch with the next transaction that there is a reason for."""
        with self._lock:
            self._touched[branch] = last_use

    def is_pending(self, name: BlockHash) -> bool:
        """Whether the block is queued and not yet on disk."""
        with self._lock:
            return name in self._pending

    def is_bad(self, name: BlockHash) -> bool:
        """Whether a record of the block was found damaged; it counts as not there until it is saved again."""
        return name in self._bad

    def mark_bad(self, name: BlockHash) -> None:
        """Treat the block as not on disk."""
        with self._lock:
            self._bad.add(name)

    @property
    def queue_length(self) -> int:
        """What waits to be saved."""
        return self._queue.qsize()

    @property
    def num_blocks(self) -> int:
        """Blocks on disk."""
        return self._ledger.slots.num_used(0)

    def check(self, index: Index) -> None:
        """Assert that the counts of slots, and the order of leaving, are those of the index."""
        if self.worker.is_alive:
            self.order(lambda ledger: ledger.check()).result()
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
                    self._save_or_say(batch)
            except BaseException:
                if isinstance(after, StoreChange):
                    self._queue.put(after)  # the thread dies: it is refused with the rest
                raise
            if isinstance(after, StoreChange):
                fulfil(after.future, partial(self._repaired, partial(self._carry_out, after)))
            elif after == "stop":
                return

    def _shrink(self) -> None:
        """Come down to a budget that was made smaller since the last time."""
        try:
            self._repaired(lambda: self.room.make(0, (), {}, self._clock()))
        except BaseException as error:
            self.trouble.failed(error, self._clock())

    def _collect(self) -> tuple[list[WaitingBlock | SequenceRecord], StoreChange | Literal["stop", "wait"]]:
        """All that waits up to the next order, and what comes after it; waits if there is nothing at all."""
        batch: list[WaitingBlock | SequenceRecord] = []
        item = self._queue.get()
        while isinstance(item, WaitingBlock | SequenceRecord):
            batch.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, "wait"
        return batch, item

    def _save_or_say(self, batch: Sequence[WaitingBlock | SequenceRecord]) -> None:
        blocks = [item for item in batch if isinstance(item, WaitingBlock)]
        turns = [item for item in batch if isinstance(item, SequenceRecord)]
        try:
            self._repaired(lambda: self._save(blocks, turns))
        except BaseException as error:
            # Border: what cannot be saved is lost at the next restart, never the thread.
            self.counts["failed_saves"] += 1
            self.counts["turns_unsaved"] += len(turns)
            self.trouble.failed(error, self._clock())
        finally:
            self._let_go(blocks)

    def _let_go(self, blocks: Sequence[WaitingBlock]) -> None:
        for block in blocks:
            self._staging.give_back(block)
        with self._lock:
            self._pending -= Counter(block.identity.hash for block in blocks)

    def _save(self, blocks: Sequence[WaitingBlock], turns: Sequence[SequenceRecord]) -> None:
        now, touched = self._clock(), self._take_touched()
        accepted = self._accept(blocks, turns, touched, now)
        rows = self._write(accepted)
        self._shards.sync()
        with self._ledger.transaction() as freed:
            self._ledger.add(rows, now)
            saved = [turn for turn in turns if turn.head == turn.root or self._known(turn.head, rows)]
            self._ledger.move(saved)
            self._ledger.touch(touched, now)
        with self._lock:
            self._bad -= {row.identity.hash for row in rows}
        if rows or saved:
            self.trouble.mended()
        self.counts["blocks_written"] += len(rows)
        self.counts["bytes_written"] += sum(record.nbytes for block in accepted for record in block.records)
        self.counts["turns_saved"] += len(saved)
        self.counts["turns_unsaved"] += len(turns) - len(saved)
        for turn in saved:
            self.on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)
        self.room.give_back(freed)

    def _take_touched(self) -> dict[BranchKey, float]:
        with self._lock:
            touched, self._touched = self._touched, {}
        return touched

    def _known(self, name: BlockHash, rows: Sequence[StoredBlock]) -> bool:
        """Whether sequences may end in this block."""
        return any(row.identity.hash == name for row in rows) or (self._ledger.has(name) and not self.is_bad(name))

    def _accept(
        self,
        blocks: Sequence[WaitingBlock],
        turns: Sequence[SequenceRecord],
        touched: Mapping[BranchKey, float],
        now: float,
    ) -> list[WaitingBlock]:
        """Those that are not on disk yet, whose parent is, and for which there is room or room can be made."""
        wanted: dict[BlockHash, WaitingBlock] = {}
        for block in blocks:
            name, parent = block.identity.hash, block.identity.parent
            if name in wanted or (self._ledger.has(name) and not self.is_bad(name)):
                continue
            if parent != block.identity.root and parent not in wanted and not self._ledger.has(parent):
                self.counts["blocks_orphaned"] += 1
            else:
                wanted[name] = block
        keep: set[bytes] = set()
        if self.room.num_blocks < len(wanted):
            keep.update(name for block in blocks for name in (block.identity.hash, block.identity.parent))
            keep.update(turn.head for turn in turns)
            keep.update(self._ledger.heads(turns))
        num_accepted = self.room.make(len(wanted), keep, touched, now)
        self.counts["blocks_refused"] += len(wanted) - num_accepted
        return list(wanted.values())[:num_accepted]

    def _write(self, blocks: Sequence[WaitingBlock]) -> list[StoredBlock]:
        """Write the records to free slots; nothing refers to them yet."""
        slots = [self._ledger.slots.next(f.part, len(blocks)) for f in self._shards.formats]
        rows = []
        for number, block in enumerate(blocks):
            places = tuple(of_part[number] for of_part in slots)
            crcs = []
            for record_format, record, slot in zip(self._shards.formats, block.records, places, strict=True):
                payload = BlockPayload(block.identity, record_format.part, record_format.payload(record))
                crcs.append(record_format.encode(payload, record))
                self._shards.write(record_format.part, slot, record)
            rows.append(StoredBlock(block.identity, places, tuple(crcs)))
        return rows

    def _carry_out(self, order: StoreChange) -> Any:
        """Make an ordered change durable; what is to be answered."""
        touched = self._take_touched()
        with self._ledger.transaction() as freed:
            self._ledger.touch(touched, self._clock())
            answer = order.change(self._ledger)
        self.room.give_back(freed)
        if freed:
            self.room.forget_full()
        return order.then(answer, freed)

    def _repaired(self, work: Callable[[], T]) -> T:
        """What `work` returns, damaged rows of the index repaired before; done once more where it meets some itself."""
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
        """Repair the index's rows; False where it cannot be done."""
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
