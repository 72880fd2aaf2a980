"""Blocks that nobody has, and which of them may still hold somebody's bytes.

Owns the list of free blocks and one flag a block. The block given back last is handed out first.
"""

from __future__ import annotations

from array import array


class FreeList:
    """Blocks 0 to `num_blocks - 1`, all free and untouched at first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)  # 1: handed out since `take_used` returned it

    def __len__(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return 4 * len(self._is_used) + len(self._is_used)

    def pop(self) -> int:
        """Hand a block out; there must be one."""
        block = self._free.pop()
        self._is_used[block] = 1
        return block

    def append(self, block: int) -> None:
        """Take a block back."""
        self._free.append(block)

    def take_used(self) -> list[int]:
        """Return the free blocks that were handed out since they were last returned here."""
        used = [block for block in self._free if self._is_used[block]]
        for block in used:
            self._is_used[block] = 0
        return used

    def check(self, free: set[int]) -> None:
        """Assert that exactly these are free, and that every other one is noted as handed out."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert set(self._free) == free, f"free: {sorted(self._free)}, but nobody has {sorted(free)}"
        unnoted = [block for block, used in enumerate(self._is_used) if not used and block not in free]
        assert not unnoted, f"blocks {unnoted} were handed out and are not noted as used"
