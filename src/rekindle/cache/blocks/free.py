"""Free blocks, and which of them may still hold bytes of an earlier user.

Owns the list of free blocks and one flag per block. The block freed last is allocated first.
"""

from __future__ import annotations

from array import array


class FreeList:
    """Blocks 0 to `num_blocks - 1`, all free and untouched at first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)  # 1: allocated since `take_used` last returned it

    def __len__(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return 4 * len(self._is_used) + len(self._is_used)

    def pop(self) -> int:
        """Allocate a block; there must be one."""
        block = self._free.pop()
        self._is_used[block] = 1
        return block

    def append(self, block: int) -> None:
        """Free a block."""
        self._free.append(block)

    def take_used(self) -> list[int]:
        """Return the free blocks that were allocated since this last returned them."""
        used = [block for block in self._free if self._is_used[block]]
        for block in used:
            self._is_used[block] = 0
        return used

    def check(self, free: set[int]) -> None:
        """Assert that exactly these are free, and that every other one is marked as used."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert set(self._free) == free, f"free: {sorted(self._free)}, but not held or published: {sorted(free)}"
        unnoted = [block for block, used in enumerate(self._is_used) if not used and block not in free]
        assert not unnoted, f"blocks {unnoted} were allocated and are not marked as used"
