"""The writer thread: what waits becomes durable, in this order and no other.

    records to free slots  →  shards synced  →  one transaction: rows, slots, sequences  →  `on_saved`, holes

So no row ever names bytes that were not durable, and a slot is written again only after the transaction that freed it.
Owns the queue and the figures of saving. What waits is taken in batches; the order in which it was queued is kept. A
block is written only if its parent is on disk (or in the same batch), a sequence moved only if its head is. A failing
batch is dropped, said once and counted; nothing of it is visible, and the thread goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.cache.hashing import BlockHash
from rekindle.kv.payload import BlockPayload
from rekindle.store.index import Index
from rekindle.store.ledger import BlockRow, Ledger, Slot
from rekindle.store.shards import Shards
from rekindle.store.staging import StagingBuffer, WaitingBlock
from rekindle.store.values import SequenceRecord

logger = logging.getLogger(__name__)

OnSaved = Callable[[str, str, int, int], object]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A change of the index that is not a save: done alone, between batches; its answer goes to `future`."""

    change: Callable[[Ledger], Any]
    future: Future[Any]


Item = WaitingBlock | SequenceRecord | Order | Literal["stop"]


class Writer:
    """Saves blocks and sequences. Only its thread calls the ledger and writes shards once it runs."""

    def __init__(
        self, ledger: Ledger, shards: Shards, staging: StagingBuffer, *, disk_bytes: int, clock: Clock
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.last_error: str | None = None
        self.disk_bytes = disk_bytes
        self.on_saved: OnSaved = _ignore
        self._ledger = ledger
        self._shards = shards
        self._staging = staging
        self._clock = clock
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._pending: Counter[BlockHash] = Counter()
        self._bad: set[BlockHash] = set()
        self._lock = threading.Lock()
        self._full_said = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to save what waits."""
        self._thread = threading.Thread(target=self._run, name="rekindle-store-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Save all that waits, then end the thread."""
        self._queue.put("stop")
        if self._thread is not None:
            self._thread.join()

    def put(self, item: WaitingBlock | SequenceRecord) -> None:
        """Queue a block or a moved sequence."""
        if isinstance(item, WaitingBlock):
            with self._lock:
                self._pending[item.name] += 1
        self._queue.put(item)

    def order(self, change: Callable[[Ledger], Any]) -> Future[Any]:
        """Queue a change of the index, after all that was queued before."""
        future: Future[Any] = Future()
        self._queue.put(Order(change, future))
        return future

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
    def used_bytes(self) -> int:
        """Bytes of all slots that hold a block."""
        return sum(f.record_bytes * self._ledger.num_used(f.part) for f in self._shards.formats)

    @property
    def num_blocks(self) -> int:
        """Blocks on disk."""
        return self._ledger.num_used(0)

    def check(self, index: Index) -> None:
        """Assert that the counts of slots kept here are those of the index."""
        marks = index.meta()
        for part in range(index.num_parts):
            kept, stored = self._ledger.num_slots[part], marks.get(f"num_slots.{part}", 0)
            assert kept == stored, f"part {part}: {kept} slots in memory, {stored} in the index"
            with index.reading() as connection:
                free = connection.execute("SELECT COUNT(*) FROM free WHERE part = ?", (part,)).fetchone()[0]
            kept = self._ledger.num_free[part]
            assert kept == free, f"part {part}: {kept} free slots in memory, {free} in the index"

    def _run(self) -> None:
        while True:
            batch, after = self._collect()
            if batch:
                self._save_or_say(batch)
            if isinstance(after, Order):
                self._carry_out(after)
            elif after == "stop":
                return

    def _collect(self) -> tuple[list[WaitingBlock | SequenceRecord], Order | Literal["stop", "wait"]]:
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
            self._save(blocks, turns)
        except Exception as error:
            self.counts["failed_saves"] += 1
            self.counts["turns_unsaved"] += len(turns)
            if self.last_error is None:
                logger.exception(
                    "SAVING FAILED, answers go on but will not survive a restart until this is mended: %s. "
                    "Check free space, permissions and the disk of the store's directory.",
                    error,
                )
            self.last_error = f"{type(error).__name__}: {error}"
        finally:
            for block in blocks:
                self._staging.give_back(block)
            with self._lock:
                self._pending -= Counter(block.name for block in blocks)

    def _save(self, blocks: Sequence[WaitingBlock], turns: Sequence[SequenceRecord]) -> None:
        accepted = self._accept(blocks)
        rows = self._write(accepted)
        self._shards.sync()
        with self._ledger.transaction() as freed:
            self._ledger.add(rows, self._clock())
            saved = [turn for turn in turns if turn.head == turn.root or self._known(turn.head, rows)]
            self._ledger.move(saved)
        with self._lock:
            self._bad -= {row.name for row in rows}
        if rows:
            self.last_error = None
        self.counts["blocks_written"] += len(rows)
        self.counts["bytes_written"] += sum(record.nbytes for block in accepted for record in block.records)
        self.counts["turns_saved"] += len(saved)
        self.counts["turns_unsaved"] += len(turns) - len(saved)
        for turn in saved:
            self.on_saved(turn.namespace, turn.agent, turn.branch, turn.num_tokens)
        self._punch(freed)

    def _known(self, name: BlockHash, rows: Sequence[BlockRow]) -> bool:
        """Whether sequences may end in this block."""
        return any(row.name == name for row in rows) or (self._ledger.has(name) and not self.is_bad(name))

    def _accept(self, blocks: Sequence[WaitingBlock]) -> list[WaitingBlock]:
        """Those that are not on disk yet, whose parent is, and for which there is room."""
        accepted: dict[BlockHash, WaitingBlock] = {}
        block_bytes = sum(f.record_bytes for f in self._shards.formats)
        room = (self.disk_bytes - self.used_bytes) // block_bytes
        for block in blocks:
            if block.name in accepted or (self._ledger.has(block.name) and not self.is_bad(block.name)):
                continue
            if block.parent != block.root and block.parent not in accepted and not self._ledger.has(block.parent):
                self.counts["blocks_orphaned"] += 1
            elif len(accepted) >= room:
                self.counts["blocks_refused"] += 1
                self._say_full()
            else:
                accepted[block.name] = block
        return list(accepted.values())

    def _say_full(self) -> None:
        if not self._full_said:
            logger.warning(
                "the store is full (%d of %d bytes): new turns are not saved; give it more with --disk-bytes or delete "
                "agents",
                self.used_bytes,
                self.disk_bytes,
            )
        self._full_said = True

    def _write(self, blocks: Sequence[WaitingBlock]) -> list[BlockRow]:
        """Write the records to free slots; nothing refers to them yet."""
        slots = [self._ledger.slots(f.part, len(blocks)) for f in self._shards.formats]
        rows = []
        for number, block in enumerate(blocks):
            places = tuple(of_part[number] for of_part in slots)
            crcs = []
            for record_format, record, slot in zip(self._shards.formats, block.records, places, strict=True):
                payload = BlockPayload(
                    name=block.name,
                    parent=block.parent,
                    root=block.root,
                    part=record_format.part,
                    ids=block.ids,
                    num_tokens=len(block.ids),
                    data=record_format.payload(record),
                )
                crcs.append(record_format.encode(payload, record))
                self._shards.write(record_format.part, slot, record)
            rows.append(BlockRow(block.name, block.parent, block.root, block.ids, places, tuple(crcs)))
        return rows

    def _carry_out(self, order: Order) -> None:
        """Make an ordered change durable and answer it; its errors go to whoever asked."""
        try:
            with self._ledger.transaction() as freed:
                answer = order.change(self._ledger)
        except Exception as error:
            order.future.set_exception(error)
            return
        self._punch(freed)
        if freed:
            self._full_said = False
        order.future.set_result(answer)

    def _punch(self, freed: Sequence[Slot]) -> None:
        """Give back the space of freed slots. That it cannot be given back harms nothing: the slot is free anyway."""
        try:
            self._shards.punch(freed)
        except OSError as error:
            logger.warning("space of freed blocks could not be given back: %s", error)


def _ignore(namespace: str, agent: str, branch: int, num_tokens: int) -> None:
    """Nobody wants to know."""
