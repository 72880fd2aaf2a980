"""Window parts of sequences: where a sequence can be resumed with them, and which ones its resume points need.

Owns no slot (`WindowSlots` do) and no block: it connects the pool's windows with the parts of the layout. Called by the
engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.resume import resume_position
from rekindle.cache.blocks.table import BlockTable
from rekindle.cache.blocks.windows import first_needed
from rekindle.spec import KVLayout
from rekindle.store.warm import StoredBlock


@dataclass(frozen=True, slots=True)
class ToLoad:
    """What to read of the blocks on disk, in order, and for each window the slots that nobody holds yet."""

    blocks: list[StoredBlock]
    num_slots: tuple[int, ...] = ()


class WindowParts:
    """The parts that end of one pool's blocks; none for models without windows, where a sequence resumes anywhere."""

    def __init__(self, pool: BlockPool, layout: KVLayout) -> None:
        self._slots = pool.windows
        self._size = pool.block_tokens
        self.indices = tuple(part.index for part in layout.ending_parts)
        expected = [part.window for part in layout.ending_parts]
        assert [slots.window for slots in self._slots] == expected, "the pool has other windows than the layout"

    def __bool__(self) -> bool:
        return bool(self._slots)

    def resume_at(self, blocks: Sequence[int], num_tokens: int) -> int:
        """Return the last position up to `num_tokens` at which these hot blocks can be resumed."""
        windows = [slots.window for slots in self._slots]
        return resume_position(
            num_tokens, windows, self._size, lambda index, which: self._slots[which].has(blocks[index])
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
        known: dict[int, StoredBlock | None] = dict(enumerate(found, len(hot)))

        def on_disk(index: int) -> StoredBlock | None:
            if index not in known:
                known[index] = stored(hot[index])
            return known[index]

        def is_hot(index: int, which: int) -> bool:
            return index < len(hot) and self._slots[which].has(hot[index])

        def has_part(index: int, which: int) -> bool:
            if is_hot(index, which):
                return True
            block = on_disk(index)
            return block is not None and self.indices[which] in block.parts

        windows = [slots.window for slots in self._slots]
        position = resume_position(num_tokens, windows, self._size, has_part)
        first = [first_needed(position, window, self._size) for window in windows]
        wanted = []
        for index in range(min(len(hot), *first), -(-position // self._size)):
            parts = {
                part for which, part in enumerate(self.indices) if index >= first[which] and not is_hot(index, which)
            }
            parts |= {0} if index >= len(hot) else set()
            block = on_disk(index) if parts else None
            if block is not None:
                wanted.append(block.only(parts))
        end = -(-position // self._size)
        num_slots = (
            sum(index >= len(hot) or not slots.is_held(hot[index]) for index in range(start, end))
            for slots, start in zip(self._slots, first, strict=True)
        )
        return ToLoad(wanted, tuple(num_slots))

    def has_room(self, wanted: ToLoad) -> bool:
        """Whether a load and what it resumes with fit in the slots that nobody holds, together."""
        return all(count <= slots.num_available for count, slots in zip(wanted.num_slots, self._slots, strict=False))

    def mark(self, table: BlockTable, positions: Iterable[int]) -> None:
        """Note that resume points at these positions need the parts before them."""
        for index, parts in self.needed(table.blocks, positions):
            for which, part in enumerate(self.indices):
                if part in parts:
                    self._slots[which].mark(table.blocks[index])

    def needed(self, blocks: Sequence[int], positions: Iterable[int]) -> list[tuple[int, set[int]]]:
        """Return the indices of blocks with the parts in hot memory that these resume points need.

        They reach a block further than the window, so that a prompt may leave the text a little before the point.
        """
        found: dict[int, set[int]] = {}
        for position in positions:
            for which, part in enumerate(self.indices):
                first = first_needed(position - self._size, self._slots[which].window, self._size)
                for index in range(first, min(-(-position // self._size), len(blocks))):
                    if self._slots[which].has(blocks[index]):
                        found.setdefault(index, set()).add(part)
        return sorted(found.items())
