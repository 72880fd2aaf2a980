"""States of recurrent layers in the blocks of an arena: which blocks have one, and after how many tokens it is.

Owns the bytes of the part of a turn's state (see `layout`). A state goes on from its own position and from no other,
and a block has one at most: that of the last turn that ended in it, or of the end of a prompt in it.

    blocks     [        ][   p1   ][        ][      p2 ]
    states               after p1            after p2          a prompt that leaves the text before p2 goes on from p1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rekindle.kv.arena import KVArena
from rekindle_backends.llama.sections import Bytes, Ints
from rekindle_backends.llama.slot_file import SlotFile


class Snapshots:
    """The states in an arena; there are none if its layout has no part for them."""

    def __init__(self, arena: KVArena) -> None:
        self._arena = arena
        self.part = arena.layout.state_part
        self._sections = () if self.part is None else self.part.state_sections[0]
        self._data: Bytes | None = None if self.part is None else arena.parts[self.part.index].numpy()

    def __bool__(self) -> bool:
        return self.part is not None

    def _row(self, block: int) -> Bytes | None:
        """The bytes of a block's part [payload bytes]; None if it has none."""
        if self.part is None or self._data is None or not self._arena.has(self.part.index, block):
            return None
        row: Bytes = self._data[self._arena.row(self.part.index, block)]
        return row

    def end(self, block: int) -> int:
        """After how many tokens a block's state is; 0 if it has none."""
        row = self._row(block)
        return 0 if row is None else int(self._mark(row)[0])

    def is_empty(self, block: int) -> bool:
        """Whether a block has the part, and no state in it."""
        row = self._row(block)
        return row is not None and not self._mark(row)[0]

    def ends(self, blocks: Sequence[int]) -> list[int]:
        """After how many tokens of a conversation its blocks have states, ascending."""
        return [end for end in map(self.end, blocks) if end]

    def take(self, file: SlotFile, block: int) -> None:
        """Copy the state of a file into a block that has the part."""
        row = self._row(block)
        assert row is not None and file.state is not None, f"block {block} or the file has no state"
        for section, state in zip(self._sections[1:], file.states(), strict=True):
            row[section.offset : section.offset + section.num_bytes] = state
        self._mark(row)[0] = file.state.num_tokens

    def copy(self, source: int, target: int) -> None:
        """Copy the state of a block into another of the same text, which has the part."""
        here, there = self._row(source), self._row(target)
        assert here is not None and there is not None, f"block {source} or {target} has no part for a state"
        there[:] = here

    def tensors(self, block: int) -> list[Bytes]:
        """The tensors of a block's state, uint8 [row bytes] each. Views."""
        row = self._row(block)
        assert row is not None, f"block {block} has no state"
        return [row[each.offset : each.offset + each.num_bytes] for each in self._sections[1:]]

    def _mark(self, row: Bytes) -> Ints:
        mark = self._sections[0]
        return row[mark.offset : mark.offset + mark.num_bytes].view(np.int32)
