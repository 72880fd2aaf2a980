"""The staging buffer: blocks waiting for the writer, so that the pool need not pin them for a disk write.

Owns a fixed amount of memory, divided into rows of one block each (the records of all its parts, side by side). The
engine thread fills rows, the writer frees them. Rows never used are never touched, so they take no physical memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rekindle.cache.blocks.identity import BlockIdentity
from rekindle.store.records import RecordFormat
from rekindle.store.values import StagedBlock

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class WaitingBlock:
    """Parts of a block in a row of the staging buffer; `records` has a buffer [record_bytes] for each."""

    identity: BlockIdentity
    row: int
    records: Mapping[int, Bytes]


class StagingBuffer:
    """`num_bytes` of memory for waiting blocks, at least two rows."""

    def __init__(self, formats: Sequence[RecordFormat], num_bytes: int) -> None:
        self._formats = tuple(formats)
        sizes = [f.record_bytes for f in formats]
        self._ends = np.cumsum([0, *sizes]).tolist()
        self.num_rows = max(2, num_bytes // sum(sizes))
        self._memory = np.empty((self.num_rows, sum(sizes)), dtype=np.uint8)
        self._free = list(reversed(range(self.num_rows)))
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Rows in use."""
        return self.num_rows - len(self._free)

    def take(self, block: StagedBlock) -> WaitingBlock | None:
        """Copy the block into a free row; None if there is none."""
        with self._lock:
            if not self._free:
                return None
            row = self._free.pop()
        ends = self._ends
        records = {part: self._memory[row, ends[part] : ends[part + 1]] for part in block.parts}
        try:
            for part, record in records.items():
                block.fill(part, self._formats[part].payload(record))
        except BaseException:
            self._give(row)
            raise
        return WaitingBlock(block.identity, row, records)

    def give_back(self, block: WaitingBlock) -> None:
        """Free the block's row; its records must not be touched afterwards."""
        self._give(block.row)

    def _give(self, row: int) -> None:
        with self._lock:
            self._free.append(row)

    def check(self) -> None:
        """Assert that no row is free twice."""
        with self._lock:
            assert len(set(self._free)) == len(self._free), "a staging row is free twice"
            assert set(self._free) <= set(range(self.num_rows)), "a staging row does not exist"
