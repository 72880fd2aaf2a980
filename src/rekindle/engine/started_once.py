"""Threads that run once after a start, which takes no longer for them.

One takes hot memory from the system: after a restart an agent's first turn loads its blocks into memory that was never
used, and would wait for every page. Owns how much: what is stored has room in it, up to an eighth of all hot memory.
The other writes the packed weights of a model to their file, for a few seconds of a stop at most.
"""

from __future__ import annotations

import threading

from rekindle.kv.arena import KVArena
from rekindle.model.loaded import Unsaved
from rekindle.worker import Worker

MOST_SHARE = 8  # one in so many blocks of hot memory, at most
PIECE_BYTES = 8 << 20  # between two looks at whether to stop
STOP_S = 5.0


class WeightsWriter:
    """Writes packed weights. An unfinished file is removed, at the latest by the next writer."""

    def __init__(self, unsaved: Unsaved) -> None:
        stopped = self._stopped = threading.Event()
        self._worker = Worker(
            "packed-weights", lambda: unsaved.save(is_stopped=stopped.is_set), on_death=lambda death: None
        )

    def start(self) -> None:
        """Start writing; call once."""
        self._worker.start()

    def stop(self) -> None:
        """Let it finish within five seconds, then give it up, even if the disk does not answer; safe before `start`."""
        self._worker.join(STOP_S)
        self._stopped.set()
        self._worker.join(STOP_S)


class Prefault:
    """Takes memory for `num_blocks` blocks; `worker` is the thread."""

    def __init__(self, arena: KVArena, num_stored: int) -> None:
        self.num_blocks = min(num_stored, arena.num_blocks // MOST_SHARE)
        self._arena = arena
        self._stopped = threading.Event()
        self.worker = Worker("prefault", self._run, on_death=lambda death: None)

    def start(self) -> None:
        """Start taking memory; call once."""
        self.worker.start()

    def stop(self) -> None:
        """Stop before the next piece; safe before `start`."""
        self._stopped.set()
        self.worker.join(STOP_S)

    def _run(self) -> None:
        """Take the memory of the blocks that are allocated first, some megabytes at a time."""
        step = max(1, PIECE_BYTES // self._arena.layout.kv_block_bytes)
        for first in range(0, self.num_blocks, step):
            end = min(first + step, self.num_blocks)
            if self._stopped.is_set() or not self._arena.populate(first, end):
                return
