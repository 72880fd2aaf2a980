"""The token ids of blocks, one row of an array for each block.

Owns the rows and how much of each is filled. Does not know names. An empty row is that of a block without a name.
"""

from __future__ import annotations

import sys

import numpy as np

from rekindle.cache.hashing import TokenIds

ID_BYTES = 4


class IdRows:
    """Up to `block_tokens` ids, as u32 little-endian, for each of `num_blocks` blocks; all empty at first."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._row_bytes = ID_BYTES * block_tokens
        self._data = bytearray(num_blocks * self._row_bytes)  # [num_blocks, block_tokens]
        self.lengths = [0] * num_blocks  # ids in each row, for reading only; a list is read twice as fast as an array

    @property
    def nbytes(self) -> int:
        return len(self._data) + sys.getsizeof(self.lengths)

    def put(self, block: int, data: bytes) -> None:
        """Fill the row with these ids."""
        assert 0 < len(data) <= self._row_bytes and not len(data) % ID_BYTES, f"{len(data)} bytes in a row"
        start = block * self._row_bytes
        self._data[start : start + len(data)] = data
        self.lengths[block] = len(data) // ID_BYTES

    def drop(self, block: int) -> None:
        """Empty the row."""
        self.lengths[block] = 0

    def holds(self, block: int, data: bytes) -> bool:
        """Say whether the row holds exactly these ids."""
        return self.lengths[block] * ID_BYTES == len(data) and self._data.startswith(data, block * self._row_bytes)

    def data(self, block: int) -> bytearray:
        """Return a copy of the row's ids as bytes."""
        start = block * self._row_bytes
        return self._data[start : start + ID_BYTES * self.lengths[block]]

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the row's ids, read-only."""
        return np.frombuffer(bytes(self.data(block)), dtype="<u4")
