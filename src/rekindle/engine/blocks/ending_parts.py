"""Parts that end (see `rekindle.parts`): where a sequence can be resumed with them, and which its resume points need.

Owns no slot (`WindowSlots` do) and no block: it connects the pool's windows with the parts of the layout. Called by the
engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable
from rekindle.cache.blocks.windows import WindowSlots, resume_position
from rekindle.spec import KVLayout
from rekindle.store.warm import StoredBlock


@dataclass(frozen=True, slots=True)
class ToLoad:
    """What to read of the blocks on disk, in order; for each window, how many slots the resume point needs in addition
    to those held, and the hot blocks among its own."""

    blocks: list[StoredBlock]
    num_slots: tuple[int, ...] = ()
    hot: tuple[list[int], ...] = ()


class _StoredChain:
    """The blocks of a stored sequence: those in memory, then those on disk, where `stored` looks up the first ones."""

    def __init__(
        self,
        slots: Sequence[WindowSlots],
        parts: Sequence[int],
        hot: Sequence[int],
        found: Sequence[StoredBlock],
        stored: Callable[[int], StoredBlock | None],
    ) -> None:
        self._slots = slots
        self._parts = parts
        self._hot = hot
        self._stored = stored
        self._known: dict[int, StoredBlock | None] = dict(enumerate(found, len(hot)))

    def on_disk(self, index: int) -> StoredBlock | None:
        """Return a block as it is on disk; None if it is not there."""
        if index not in self._known:
            self._known[index] = self._stored(self._hot[index])
        return self._known[index]

    def is_hot(self, index: int, which: int) -> bool:
        """Whether a block's part of a window is in memory."""
        return index < len(self._hot) and self._slots[which].has(self._hot[index])

    def has_part(self, index: int, which: int) -> bool:
        """Whether a block's part of a window is in memory or on disk."""
        if self.is_hot(index, which):
            return True
        block = self.on_disk(index)
        return block is not None and self._parts[which] in block.parts


class EndingParts:
    """The parts that end of one pool's blocks; none for models with full attention alone, which resume anywhere."""

    def __init__(self, pool: BlockPool, layout: KVLayout) -> None:
        self._slots = pool.windows
        self._size = pool.block_tokens
        self.indices, self._kinds = tuple(layout.ending), tuple(layout.ending.values())
        assert tuple(slots.kind for slots in self._slots) == self._kinds, "the pool has other parts than the layout"
        self._inside_blocks = all(kind.can_resume_inside_blocks for kind in self._kinds)

    def __bool__(self) -> bool:
        return bool(self._slots)

    def usable(self, num_tokens: int, num_resumable: int) -> int:
        """Return how many matched tokens a resume point can have: with states, those of full blocks among the first
        `num_resumable`, which need not be computed."""
        if self._inside_blocks:
            return num_tokens
        return min(num_tokens, num_resumable) // self._size * self._size

    def is_early(self, position: int, num_tokens: int, num_resumable: int) -> bool:
        """Whether a sequence resumes before the point that the end of its match would keep."""
        if self._inside_blocks:
            return position < num_tokens
        return position < (min(num_tokens, num_resumable) - 1) // self._size * self._size

    def resume_at(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Return the last position up to `num_tokens` at which these hot blocks can be resumed."""
        return resume_position(
            num_tokens, self._kinds, self._size, lambda index, which: self._slots[which].has(blocks[index])
        )

    def to_load(
        self,
        hot: Sequence[int],
        found: Sequence[StoredBlock],
        num_tokens: int,
        stored: Callable[[int], StoredBlock | None],
    ) -> ToLoad:
        """Return what to read so that a sequence resumes as near to `num_tokens` as it can.

        Its blocks are `hot`, then `found` on disk; `stored` looks up a hot one there.
        """
        if not self._slots:
            return ToLoad(list(found))
        chain = _StoredChain(self._slots, self.indices, hot, found, stored)
        position = resume_position(num_tokens, self._kinds, self._size, chain.has_part)
        first, end = [kind.first_needed(position, self._size) for kind in self._kinds], -(-position // self._size)
        wanted = []
        for index in range(min(len(hot), *first), end):
            lacking = (which for which, start in enumerate(first) if start <= index and not chain.is_hot(index, which))
            parts = {self.indices[which] for which in lacking} | ({0} if index >= len(hot) else set())
            block = chain.on_disk(index) if parts else None
            if block is not None:
                wanted.append(block.only(parts))
        needed = [hot[start:end] for start in first]
        held = (sum(map(slots.is_held, blocks)) for slots, blocks in zip(self._slots, needed, strict=True))
        return ToLoad(
            wanted,
            tuple(end - start - count for start, count in zip(first, held, strict=True)),
            tuple([*filter(slots.has, blocks)] for slots, blocks in zip(self._slots, needed, strict=True)),
        )

    def reserve(self, wanted: ToLoad) -> bool:
        """Keep what a resume point has in memory from being replaced by what is read for it; False if both do not
        fit."""
        needed = list(zip(self._slots, wanted.num_slots, wanted.hot, strict=False))
        if any(count > slots.num_available for slots, count, _ in needed):
            return False
        for slots, _, hot in needed:
            for block in hot:
                slots.touch(block)
        return True

    def mark(self, table: BlockTable, positions: Iterable[int]) -> None:
        """Note that resume points at these positions need the parts before them."""
        for index, parts in self.needed(table.blocks, positions):
            for which, part in enumerate(self.indices):
                if part in parts:
                    self._slots[which].mark(table.blocks[index])

    def needed(self, blocks: Sequence[int], positions: Iterable[int]) -> list[tuple[int, set[int]]]:
        """Return the indices of blocks with the parts in hot memory that these resume points need.

        See `rekindle.parts`.
        """
        found: dict[int, set[int]] = {}
        for position in positions:
            for part, kind, slots in zip(self.indices, self._kinds, self._slots, strict=True):
                for index in kind.kept_blocks(position, self._size):
                    if index < len(blocks) and slots.has(blocks[index]):
                        found.setdefault(index, set()).add(part)
        return sorted(found.items())
