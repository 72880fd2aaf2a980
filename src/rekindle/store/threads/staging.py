"""The staging buffer: blocks waiting for the writer, so that the pool need not pin them for a disk write.

Owns a fixed amount of memory, divided into rows of one record each. Parts have rows of their own: a snapshot of states
may be hundreds of times as large as a block's KV. The engine thread fills rows, the writer frees them. Rows never used
are never touched, so they take no physical memory.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from rekindle.store.files.records import RecordFormat
from rekindle.store.values import Bytes


class StagingBuffer:
    """`num_bytes` of memory for waiting blocks, the same for each part, and at least two rows of each."""

    def __init__(self, formats: Sequence[RecordFormat], num_bytes: int) -> None:
        self._formats = tuple(formats)
        sizes = [record.record_bytes for record in formats]
        self._num_rows = [max(2, num_bytes // len(sizes) // size) for size in sizes]
        self._memory = [
            np.empty((rows, size), dtype=np.uint8) for rows, size in zip(self._num_rows, sizes, strict=True)
        ]
        self._free = [list(reversed(range(rows))) for rows in self._num_rows]
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Rows in use."""
        return sum(self._num_rows) - sum(map(len, self._free))

    @property
    def is_half_full(self) -> bool:
        """Whether half of the rows of any part, or more, are in use."""
        return any(2 * len(free) <= rows for free, rows in zip(self._free, self._num_rows, strict=True))

    def take(self, parts: Collection[int]) -> dict[int, int] | None:
        """Take a row for each of these parts of a block; None if there are too few."""
        with self._lock:
            if not all(self._free[part] for part in parts):
                return None
            return {part: self._free[part].pop() for part in parts}

    def record(self, part: int, row: int) -> Bytes:
        """The memory of a row [record_bytes]."""
        record: Bytes = self._memory[part][row]
        return record

    def payload(self, part: int, row: int) -> Bytes:
        """Where a row has the payload [payload_bytes]."""
        return self._formats[part].payload(self._memory[part][row])

    def give_back(self, rows: Mapping[int, int]) -> None:
        """Free the rows of a block; they must not be touched afterwards."""
        with self._lock:
            for part, row in rows.items():
                self._free[part].append(row)

    def check(self) -> None:
        """Assert that no row is free twice."""
        with self._lock:
            for free, num_rows in zip(self._free, self._num_rows, strict=True):
                assert len(set(free)) == len(free), "a staging row is free twice"
                assert set(free) <= set(range(num_rows)), "a staging row does not exist"
