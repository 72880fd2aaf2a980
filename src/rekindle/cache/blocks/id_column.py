"""The token ids of blocks, one row of an array per block.

Owns the rows and how much of each is filled. Does not know hashes. The row of an unpublished block is empty.
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from rekindle.cache.blocks.hashing import TokenIds

ID_BYTES = 4


class IdRows:
    """Up to `block_tokens` ids, as u32 little-endian, for each of `num_blocks` blocks; all empty at first."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._row_bytes = ID_BYTES * block_tokens
        self._row_at = Struct(f"{self._row_bytes}s").unpack_from
        self._data = np.zeros(
            num_blocks * self._row_bytes, np.uint8
        ).data  # [num_blocks, block_tokens]; see `hash_column`
        self.lengths = np.zeros(num_blocks, np.uint32).data  # ids in each row; read-only for others

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self.lengths.nbytes

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
        """Return whether the row holds exactly these ids."""
        if self.lengths[block] * ID_BYTES != len(data):
            return False
        is_same: bool = self._row_at(self._data, block * self._row_bytes)[0].startswith(data)
        return is_same

    def data(self, block: int) -> bytes:
        """Return a copy of the row's ids as bytes."""
        row: bytes = self._row_at(self._data, block * self._row_bytes)[0]
        return row[: ID_BYTES * self.lengths[block]]

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the row's ids, read-only."""
        return np.frombuffer(self.data(block), dtype="<u4")
