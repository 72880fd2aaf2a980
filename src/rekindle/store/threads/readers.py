"""The reader threads: read records from disk and verify each before delivering it.

Owns one buffer per thread and the figures of loading. One thread serves a load, in order, and stops at the first record
that does not match its block exactly. Damage is reported once per block and never fails the load. If no thread is left,
a load completes at once with no blocks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rekindle.store.files.records import BadRecord
from rekindle.store.files.shards import Shards, read_record
from rekindle.store.values import StoredBlock
from rekindle.worker import Death, Worker

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Deliver = Callable[[int, int, Bytes], object]
Done = Callable[[int], object]


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Blocks to read in order, with the parts to read, and callbacks for their payloads and for how many were read."""

    blocks: tuple[StoredBlock, ...]
    deliver: Deliver
    done: Done


class Readers:
    """`num_threads` threads that serve loads and call `report_bad(block, reason)`.

    `stopping` is set once they should end.
    """

    def __init__(self, shards: Shards, num_threads: int, report_bad: Callable[[StoredBlock, str], object]) -> None:
        self._shards = shards
        self._report_bad = report_bad
        self._queue: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
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

    def put(self, blocks: Sequence[StoredBlock], deliver: Deliver, done: Done) -> None:
        """Queue a load."""
        self._queue.put(LoadJob(tuple(blocks), deliver, done))
        if self._ended.is_set() or not self._is_any_left:
            self._answer_rest()

    @property
    def _is_any_left(self) -> bool:
        return any(worker.death is None for worker in self.workers)

    def _died(self, death: Death) -> None:
        if not self._is_any_left:
            self._answer_rest()

    def _answer_rest(self) -> None:
        """Complete the remaining loads with no blocks, as no thread is left to serve them. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    self._report(job, 0)

    def _run(self) -> None:
        buffers = [np.empty(f.record_bytes, dtype=np.uint8) for f in self._shards.formats]
        while (job := self._queue.get()) is not None:
            self._report(job, self._hand_over_all(job, buffers))

    @staticmethod
    def _report(job: LoadJob, num_good: int) -> None:
        try:
            job.done(num_good)
        except BaseException:
            # Border: a receiver's failure must not end the thread.
            logger.exception("a receiver of loaded blocks failed")

    def _hand_over_all(self, job: LoadJob, buffers: Sequence[Bytes]) -> int:
        """Deliver blocks in order until one is bad or its receiver fails; return how many."""
        for number, block in enumerate(job.blocks):
            if self.stopping.is_set():
                return number
            try:
                if not self._hand_over(job, number, buffers):
                    return number
            except BaseException:
                # Border: a block that cannot be read or delivered is recomputed.
                logger.exception("block %s could not be delivered", block.identity.hash.hex())
                return number
        return len(job.blocks)

    def _hand_over(self, job: LoadJob, number: int, buffers: Sequence[Bytes]) -> bool:
        """Deliver one block; False if it is damaged."""
        block = job.blocks[number]
        try:
            payloads = [read_record(self._shards, block, place, buffers[place.part]) for place in block.places]
        except BadRecord as bad:
            self._report_bad(block, str(bad))
            return False
        for place, payload in zip(block.places, payloads, strict=True):
            job.deliver(number, place.part, payload)
        with self._lock:
            self.blocks_read += 1
            self.bytes_read += sum(buffers[place.part].nbytes for place in block.places)
        return True
