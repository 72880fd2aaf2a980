"""The reader threads: read records from disk and verify each before delivering it.

Owns buffers for a run of blocks per thread, and the figures of loading. One thread serves a load, in order, a run at a
time, and stops at the first record that does not match its block exactly. Damage is reported once per block and never
fails the load. If no thread is left, a load completes at once with no blocks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.store.files.records import BadRecord
from rekindle.store.files.shards import Shards, read_record
from rekindle.store.values import Bytes, StoredBlock
from rekindle.worker import Death, Worker

logger = logging.getLogger(__name__)

RUN_BLOCKS = 8  # read before they are delivered together
RUN_BYTES = 16 << 20  # of one part, or of one block where that is larger
Deliver = Callable[[int, Sequence[Mapping[int, Bytes]]], object]
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
        sizes = [record_format.record_bytes for record_format in self._shards.formats]
        rows = [max(1, min(RUN_BLOCKS, RUN_BYTES // size)) for size in sizes]
        buffers = [np.empty(shape, dtype=np.uint8) for shape in zip(rows, sizes, strict=True)]
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
        """Deliver blocks in order until one is bad or their receiver fails; return how many."""
        num_good, is_over = 0, False
        while num_good < len(job.blocks) and not is_over:
            run, is_over = self._read(job.blocks[num_good:], buffers)
            try:
                if run:
                    job.deliver(num_good, run)
            except BaseException:
                # Border: blocks that cannot be delivered are recomputed.
                logger.exception("blocks from %s on could not be delivered", job.blocks[num_good].identity.hash.hex())
                break
            blocks = job.blocks[num_good : num_good + len(run)]
            num_good += len(run)
            with self._lock:
                self.blocks_read += len(run)
                self.bytes_read += sum(buffers[place.part].shape[1] for block in blocks for place in block.places)
        return num_good

    def _read(self, blocks: Sequence[StoredBlock], buffers: Sequence[Bytes]) -> tuple[list[dict[int, Bytes]], bool]:
        """Read leading blocks, as many as there are buffers for: their payloads by part, and whether the load is over,
        as the next block is bad or the thread should end."""
        run: list[dict[int, Bytes]] = []
        used = [0] * len(buffers)
        for block in blocks:
            if self.stopping.is_set():
                return run, True
            payloads: dict[int, Bytes] = {}
            try:
                if any(used[place.part] == len(buffers[place.part]) for place in block.places):
                    break
                for place in block.places:
                    row = buffers[place.part][used[place.part]]
                    payloads[place.part] = read_record(self._shards, block, place, row)
                    used[place.part] += 1
            except BadRecord as bad:
                self._report_bad(block, str(bad))
                return run, True
            except BaseException:
                # Border: a block that cannot be read is recomputed.
                logger.exception("block %s could not be read", block.identity.hash.hex())
                return run, True
            run.append(payloads)
        return run, False
