"""The kinds of parts that a block has: what layers of a kind keep of a sequence, and in which of its blocks.

A *full* part is in every block: K and V of full attention or, where all layers have windows, of the smallest. Parts of
the other kinds *end*: the next token needs them of the last blocks only. Memory and disk keep those near *resume
points* alone, positions at which every layer has what it needs to go on: a sequence is resumed at one, and what follows
it is computed again. A new kind of layer state is a class here: readers ask its methods. Knows no bytes (`spec` does),
no slots (`cache/blocks/windows` does), and not which positions become resume points.

    position            ............................p           the next token
    a window            [      ][      ][ needed ][ needed ]     of the blocks in its window before p
    a state             [      ][      ][      ][ needed ]       of the block before p: the state after its last token
    a turn's state      [      ][      ][      ][ kept|p         of the block that p is in: the state after p tokens
    kept for a point    [      ][ kept ][ kept   ][ kept   ]     one block more than needed; of states one block
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

LEAST_STATES = 8  # of a request: its last two blocks, and some resume points, which can do without
STATES_AHEAD = 3  # the last block, and the resume points that a chunk is likely to have


@dataclass(frozen=True, slots=True)
class FullPart:
    """K and V that all later tokens need: every block has the part."""

    name: ClassVar[str] = "full"

    def most_kept(self, num_tokens: int, block_tokens: int) -> int:
        """How many blocks of a sequence of `num_tokens` keep the part, at most."""
        return -(-num_tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class WindowPart:
    """K and V of layers in which a token attends to the last `window` tokens, itself among them."""

    window: int

    can_resume_inside_blocks: ClassVar[bool] = True
    can_skip_resume_points: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """As logs and errors call it."""
        return f"window-{self.window}"

    def first_needed(self, position: int, block_tokens: int) -> int:
        """The first block whose part the token at `position` needs, or the one before it, which may run again."""
        return max(0, position - self.window) // block_tokens

    def first_held(self, position: int, block_tokens: int) -> int:
        """The first block whose part a sequence with `position` tokens holds."""
        return self.first_needed(position, block_tokens)

    def kept_blocks(self, position: int, block_tokens: int) -> range:
        """The blocks whose part a resume point at `position` keeps: one more than it needs.

        So a prompt may leave the text up to a block before the point.
        """
        return range(self.first_needed(position - block_tokens, block_tokens), -(-position // block_tokens))

    def written_blocks(
        self, first: int, end: int, block_tokens: int, resume_points: Collection[int]
    ) -> Collection[int]:
        """Which of the blocks [first, end) need the part while they are computed: all."""
        return range(first, end)

    def most_kept(self, num_tokens: int, block_tokens: int) -> int:
        """How many blocks of a sequence of `num_tokens` keep the part for one resume point, at most."""
        return min(-(-num_tokens // block_tokens), self._cover(block_tokens))

    def least_slots(self, chunk_tokens: int, block_tokens: int) -> int:
        """Slots for one request: its window, the blocks of a chunk, and a copy of a shared tail."""
        return self._cover(block_tokens) + -(-chunk_tokens // block_tokens) + 2

    def slots_ahead(self, chunk_blocks: int) -> int:
        """Slots that a prompt may need at once, if a chunk of it has `chunk_blocks`."""
        return chunk_blocks

    def _cover(self, block_tokens: int) -> int:
        return -(-self.window // block_tokens) + 2


@dataclass(frozen=True, slots=True)
class StatePart:
    """The states of recurrent layers after the last token of a block, or after the last one that was computed.

    A state cannot be cut back, so resume points lie at the ends of blocks. It is needed by the next token alone.
    """

    name: ClassVar[str] = "state"
    can_resume_inside_blocks: ClassVar[bool] = False
    can_skip_resume_points: ClassVar[bool] = True

    def first_needed(self, position: int, block_tokens: int) -> int:
        """The block of the token before `position`."""
        return max(0, position - 1) // block_tokens

    def first_held(self, position: int, block_tokens: int) -> int:
        """The block before the one that is needed, the last full one: what is computed may be taken back to there."""
        return max(0, self.first_needed(position, block_tokens) - 1)

    def kept_blocks(self, position: int, block_tokens: int) -> range:
        """The block of a resume point at `position`: at the last end of one before it, as the last token of a prompt is
        always computed."""
        end = max(0, position - 1) // block_tokens
        return range(max(0, end - 1), end)

    def written_blocks(
        self, first: int, end: int, block_tokens: int, resume_points: Collection[int]
    ) -> Collection[int]:
        """Which of the blocks [first, end) need the part: the last one, and those that resume points keep."""
        kept = {block for at in resume_points for block in self.kept_blocks(at, block_tokens)}
        return sorted({block for block in kept if first <= block < end} | {*range(max(first, end - 1), end)})

    def most_kept(self, num_tokens: int, block_tokens: int) -> int:
        """One block for one resume point."""
        return min(1, num_tokens)

    def least_slots(self, chunk_tokens: int, block_tokens: int) -> int:
        """Slots for one request: those that it holds, and its resume points."""
        return LEAST_STATES

    def slots_ahead(self, chunk_blocks: int) -> int:
        """Slots that a prompt may need at once: for its last block and its resume points."""
        return STATES_AHEAD


@dataclass(frozen=True, slots=True)
class TurnStatePart(StatePart):
    """States of recurrent layers as an engine leaves them at the end of a turn, which may be inside a block.

    A block has one at most, and its bytes say after how many tokens it is: an engine looks for it by itself.
    """

    name: ClassVar[str] = "turn-state"
    can_resume_inside_blocks: ClassVar[bool] = True

    def first_needed(self, position: int, block_tokens: int) -> int:
        """None: the next token is computed where its state is already."""
        return -(-position // block_tokens)

    def first_held(self, position: int, block_tokens: int) -> int:
        """The block of the token before `position`, if it has the part."""
        return max(0, position - 1) // block_tokens

    def kept_blocks(self, position: int, block_tokens: int) -> range:
        """The block of the token before `position`."""
        return range(self.first_held(position, block_tokens), -(-position // block_tokens))

    def written_blocks(
        self, first: int, end: int, block_tokens: int, resume_points: Collection[int]
    ) -> Collection[int]:
        """Which of the blocks [first, end) need the part: those of resume points."""
        kept = {block for at in resume_points for block in self.kept_blocks(at, block_tokens)}
        return sorted(block for block in kept if first <= block < end)


EndingPart = WindowPart | StatePart
Part = FullPart | EndingPart
FULL, STATE, TURN_STATE = FullPart(), StatePart(), TurnStatePart()


def attention_part(window: int | None) -> FullPart | WindowPart:
    """The part of attention that sees the last `window` tokens; None: all."""
    return FULL if window is None else WindowPart(window)
