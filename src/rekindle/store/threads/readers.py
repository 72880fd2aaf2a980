"""The reader threads: read records from disk, and verify each before its payload counts as there.

Owns the figures of loading. A load is cut into runs of a few blocks, and all threads serve the runs of one load before
those of the next. It ends at the first block whose record is not exactly that of its block; later runs that were read
by then do not count. Damage is reported once per block and never fails the load. If no thread is left, a load completes
at once with the blocks read so far.

The kernels, where there are some, read records and compare: each is byte for byte as it must be, or not. One that is
not is read again by Python, which alone says what is wrong with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rekindle.store.files.records import BadRecord
from rekindle.store.files.sealed_reader import SealedReader
from rekindle.store.files.shards import ReadRecords, Shards, read_record
from rekindle.store.values import Bytes, Place, StoredBlock
from rekindle.worker import Death, Worker

logger = logging.getLogger(__name__)

RUN_BLOCKS = 8  # read before they are delivered together
RUN_BYTES = 16 << 20  # or one block where that is larger
Payloads = Mapping[int, Bytes]  # of a block, by part
# Where the payloads of these blocks go, the first of which has this number in its load.
Room = Callable[[int, Sequence[StoredBlock]], Sequence[Payloads]]
Deliver = Callable[[int, Sequence[Payloads]], object]
Done = Callable[[int], object]


class _Wanted(NamedTuple):
    """A record of a run: the number of its block there, that block, its place, and where the payload goes."""

    number: int
    block: StoredBlock
    place: Place
    payload: Bytes


class _Load:
    """A load and how far it came: runs of blocks [0, `_next`) were taken, those before `_end` can be had.

    The last run that ends calls `done`, once.
    """

    def __init__(
        self, blocks: Sequence[StoredBlock], room: Room, deliver: Deliver, done: Done, *, run_blocks: int
    ) -> None:
        self.room, self.deliver = room, deliver
        self._done = done
        self._blocks = tuple(blocks)
        self._run_blocks = run_blocks
        self._next, self._end = 0, len(blocks)
        self._num_running = 0
        self._is_answered = False
        self._lock = threading.Lock()

    @property
    def num_runs(self) -> int:
        """At least one, in which a load of nothing ends."""
        return max(1, -(-len(self._blocks) // self._run_blocks))

    def take(self) -> tuple[int, tuple[StoredBlock, ...]]:
        """Begin the next run: the number of its first block, and its blocks; none if the load is over."""
        with self._lock:
            first, self._next = self._next, max(self._next, min(self._next + self._run_blocks, self._end))
            self._num_running += 1
            return first, self._blocks[first : self._next]

    def end(self, bad: int | None) -> None:
        """End a run: the load ends at this block if there is one that cannot be had."""
        with self._lock:
            self._num_running -= 1
            self._end = self._end if bad is None else min(self._end, bad)
        self._answer()

    def cut(self) -> None:
        """End the load with the runs that were taken."""
        with self._lock:
            self._end = min(self._end, self._next)
        self._answer()

    def _answer(self) -> None:
        with self._lock:
            if self._is_answered or self._num_running or self._next < self._end:
                return
            self._is_answered = True
        try:
            self._done(self._end)
        except BaseException:
            # Border: a receiver's failure must not end the thread.
            logger.exception("a receiver of loaded blocks failed")


class Readers:
    """`num_threads` threads that serve loads and call `report_bad(block, reason)`.

    `stopping` is set once they should end. `read_records`: the kernels', if there are some; encrypted records are read
    by Python, which has the library that decrypts them.
    """

    def __init__(
        self,
        shards: Shards,
        num_threads: int,
        report_bad: Callable[[StoredBlock, str], object],
        read_records: ReadRecords | None = None,
    ) -> None:
        self._shards = shards
        self._report_bad = report_bad
        self.read_records = SealedReader(shards.read_file) if shards.are_sealed else read_records
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()  # a load is there once for each of its runs
        self.stopping = threading.Event()
        self._ended = threading.Event()
        self.workers = tuple(
            Worker(f"store-reader-{number}", self._run, on_death=self._died) for number in range(num_threads)
        )
        self._lock = threading.Lock()
        self.blocks_read = 0
        self.bytes_read = 0

    def start(self) -> None:
        """Start the threads."""
        for worker in self.workers:
            worker.start()

    def stop(self) -> None:
        """End running loads with the blocks read so far and queued ones with none, then join the threads."""
        self.stopping.set()
        for _ in self.workers:
            self._queue.put(None)
        for worker in self.workers:
            worker.join()
        self._ended.set()
        self._answer_rest()

    def put(self, blocks: Sequence[StoredBlock], deliver: Deliver, done: Done, room: Room | None = None) -> None:
        """Queue a load; its payloads get memory of their own where there is no `room` for them."""
        load = _Load(blocks, room or self._new_memory, deliver, done, run_blocks=self._run_blocks(blocks))
        for _ in range(load.num_runs):
            self._queue.put(load)
        if self._ended.is_set() or not self._is_any_left:
            self._answer_rest()

    def _run_blocks(self, blocks: Sequence[StoredBlock]) -> int:
        """Blocks of a run: few enough for all threads to have a share."""
        most = max((self._num_bytes(block) for block in blocks), default=1)
        return max(1, min(RUN_BLOCKS, RUN_BYTES // max(1, most), -(-len(blocks) // len(self.workers))))

    def _num_bytes(self, block: StoredBlock) -> int:
        return sum(self._shards.formats[place.part].record_bytes for place in block.places)

    def _new_memory(self, first: int, blocks: Sequence[StoredBlock]) -> Sequence[Payloads]:
        formats = self._shards.formats
        return [
            {place.part: np.empty(formats[place.part].payload_bytes, dtype=np.uint8) for place in block.places}
            for block in blocks
        ]

    @property
    def _is_any_left(self) -> bool:
        return any(worker.death is None for worker in self.workers)

    def _died(self, death: Death) -> None:
        if not self._is_any_left:
            self._answer_rest()

    def _answer_rest(self) -> None:
        """Complete the remaining loads, as no thread is left to serve them. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                load = self._queue.get_nowait()
                if load is not None:
                    load.cut()

    def _run(self) -> None:
        buffers = [np.empty(each.record_bytes, dtype=np.uint8) for each in self._shards.formats]
        while (load := self._queue.get()) is not None:
            if self.stopping.is_set():
                load.cut()
            first, blocks = load.take()
            num_good = 0
            try:
                if blocks:
                    num_good = self._hand_over(load, first, blocks, buffers)
            finally:
                load.end(first + num_good if num_good < len(blocks) else None)

    def _hand_over(self, load: _Load, first: int, blocks: Sequence[StoredBlock], buffers: Sequence[Bytes]) -> int:
        """Read and deliver a run up to its first bad block; return how many were, none if the receiver fails."""
        try:
            run = load.room(first, blocks)
            num_good = self._read(blocks, run, buffers)
            if num_good:
                load.deliver(first, run[:num_good])
        except BaseException:
            # Border: blocks that cannot be delivered are recomputed.
            logger.exception("blocks from %s on could not be delivered", blocks[0].identity.hash.hex())
            return 0
        with self._lock:
            self.blocks_read += num_good
            self.bytes_read += sum(map(self._num_bytes, blocks[:num_good]))
        return num_good

    def _read(self, blocks: Sequence[StoredBlock], run: Sequence[Payloads], buffers: Sequence[Bytes]) -> int:
        """Read a run's records to where they go; return the number of leading blocks that are intact."""
        wanted = [
            _Wanted(number, block, place, run[number][place.part])
            for number, block in enumerate(blocks)
            for place in block.places
        ]
        at = 0
        while at < len(wanted):
            if self.stopping.is_set():
                return wanted[at].number
            at += self._read_fast(wanted[at:])
            if at < len(wanted) and not self._read_slowly(wanted[at], buffers):
                return wanted[at].number
            at += 1
        return len(blocks)

    def _read_fast(self, wanted: Sequence[_Wanted]) -> int:
        """Read by the kernels: the number of leading records that are as they must be; those before may be anything."""
        if self.read_records is None:
            return 0
        try:
            return self.read_records([self._shards.wanted(each.block, each.place, each.payload) for each in wanted])
        except OSError:
            return 0  # a file is missing, which is reported for the first of its records

    def _read_slowly(self, wanted: _Wanted, buffers: Sequence[Bytes]) -> bool:
        """Read a record by Python, and report it if it is damaged; nothing is left of one that cannot be had."""
        block, place = wanted.block, wanted.place
        try:
            wanted.payload[:] = read_record(self._shards, block, place, buffers[place.part])
            return True
        except BadRecord as bad:
            self._report_bad(block, str(bad))
        except BaseException:
            # Border: a block that cannot be read is recomputed.
            logger.exception("block %s could not be read", block.identity.hash.hex())
        wanted.payload[:] = 0
        return False
