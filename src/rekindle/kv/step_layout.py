"""One step's rows against the block tables, for any device: where each is written, what its sequence may read.

Built once per step and shared by all layers; what depends on a window or on states is made at first use. Numbers and
numpy only: knows no layer's bytes and no tensors.

    a sequence   |<-------------- context, in blocks -------------->|
    its span                       [start ......... start + num_rows)
    runs         [start .. a) [a .. mutual .. b) [b .. end)     each row sees up to itself, mutual ones all up to b
    segments     [start .... b) [b ........ c) [c ... end)      b, c: ends of blocks whose state is kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from rekindle.cache.blocks.windows import ABSENT
from rekindle.parts import STATE, Part, attention_part

RowsOf = Callable[[Part, np.ndarray], np.ndarray]


class Run(NamedTuple):
    """Rows at positions [first, end): each sees the positions up to its own, or if they are mutual, up to `end`."""

    first: int
    end: int
    is_mutual: bool


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Rows `start .. start + num_rows` of a sequence whose positions lie in `blocks`.

    Rows at positions below `num_stored` are computed, not written: their KV is in the blocks already. `mutual`: first
    position and end of stretches whose rows see each other, in order, as the tokens of a picture may.
    """

    blocks: Sequence[int]
    start: int
    num_rows: int
    num_stored: int
    mutual: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.start + self.num_rows

    def runs(self) -> Iterator[Run]:
        """Yield its rows in order, cut where it changes what they see."""
        position = self.start
        for first, end in self.mutual:
            if position < first:
                yield Run(position, first, False)
            yield Run(first, end, True)
            position = end
        if position < self.end:
            yield Run(position, self.end, False)

    def seen(self) -> np.ndarray | None:
        """Return the position after the last token that each row sees, int64 [rows]; None: its own."""
        if not self.mutual:
            return None
        ends = np.arange(self.start + 1, self.end + 1)
        for first, end in self.mutual:
            ends[first - self.start : end - self.start] = end
        return ends


def same_rows(kind: Part, blocks: np.ndarray) -> np.ndarray:
    """The rows of blocks where every block has one in each part, its own."""
    return blocks


class StepLayout:
    """Rows in the order of `spans`, padded to `num_rows` with rows that nothing reads and nobody writes.

    `rows_of` gives the arena's rows of blocks in a part, as `KVArena.rows_of`. ValueError if rows do not fit, a span
    is empty, or blocks are missing for its positions.
    """

    def __init__(
        self, spans: Sequence[SequenceSpan], block_tokens: int, num_rows: int, rows_of: RowsOf = same_rows
    ) -> None:
        self.spans = tuple(spans)
        self.num_rows = num_rows
        self.num_used = sum(span.num_rows for span in self.spans)
        self.block_tokens = block_tokens
        if self.num_used > num_rows:
            raise ValueError(f"{self.num_used} rows do not fit a step of {num_rows}")
        for span in self.spans:
            if span.num_rows < 1 or span.start < 0:
                raise ValueError(f"a span needs at least one row from position 0 on: {span.num_rows} at {span.start}")
            if len(span.blocks) * block_tokens < span.end:
                raise ValueError(f"{len(span.blocks)} blocks do not hold position {span.end - 1}")
            edges = [span.start, *chain(*span.mutual), span.end]
            if edges != sorted(edges):
                raise ValueError(f"rows that see each other are at {span.mutual}, the span at {span.start, span.end}")
        positions, self._blocks, self.written = self._rows()
        self._rows_of, self._targets = rows_of, dict[int | None, np.ndarray]()
        self.row_offsets = (positions % block_tokens).astype(np.int32)
        self.num_written = int(self.written.sum())

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position, block and "is written" of every row."""
        positions = np.zeros(self.num_rows, np.int64)
        blocks = np.zeros(self.num_rows, np.int64)
        written = np.zeros(self.num_rows, bool)
        row = 0
        for span in self.spans:
            own = slice(row, row + span.num_rows)
            positions[own] = np.arange(span.start, span.start + span.num_rows)
            first, last = span.start // self.block_tokens, positions[own.stop - 1] // self.block_tokens
            table = np.asarray(span.blocks[first : last + 1], np.int64)
            blocks[own] = table[positions[own] // self.block_tokens - first]
            written[own] = positions[own] >= span.num_stored
            row = own.stop
        return positions, blocks, written

    def rows_of_spans(self) -> Iterator[tuple[int, SequenceSpan]]:
        """Each span with its first row in the step."""
        row = 0
        for span in self.spans:
            yield row, span
            row += span.num_rows

    def row_blocks(self, window: int | None) -> np.ndarray:
        """Where each row is written in the part of a window, int32 [rows]: a row of the arena, -1 if it is not."""
        if window not in self._targets:
            targets = np.where(self.written, self._rows_of(attention_part(window), self._blocks), -1)
            self._targets[window] = targets.astype(np.int32)
        return self._targets[window]

    def context(self, window: int | None, span: SequenceSpan) -> np.ndarray:
        """The arena's rows of a span's blocks in the part of a window, int32 [blocks]."""
        return self._rows_of(attention_part(window), np.asarray(span.blocks, np.int32)).astype(np.int32, copy=False)

    @cached_property
    def states(self) -> StatePlan:
        """Where the states of recurrent layers come from and go to."""
        return StatePlan.build(self.spans, self.block_tokens, lambda blocks: self._rows_of(STATE, blocks))


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `row .. row + num_rows` of the step, in `span`.

    `source` and `target`: the arena's rows of the state before and after them; None before position 0.
    """

    span: int
    row: int
    num_rows: int
    source: int | None
    target: int


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that run together: single rows of several sequences, or one segment."""

    segments: tuple[Segment, ...]

    @property
    def rows(self) -> slice | list[int]:
        """The rows of the step: a range where they follow each other."""
        first, last = self.segments[0], self.segments[-1]
        if last.row + last.num_rows - first.row == sum(segment.num_rows for segment in self.segments):
            return slice(first.row, last.row + last.num_rows)
        return [segment.row for segment in self.segments]

    @property
    def continues(self) -> bool:
        """Whether there are states before it."""
        return self.segments[0].source is not None


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The groups of a step, in an order in which every state is there before it is needed."""

    groups: tuple[Group, ...]

    @classmethod
    def build(
        cls, spans: Sequence[SequenceSpan], block_tokens: int, rows_of: Callable[[np.ndarray], np.ndarray]
    ) -> StatePlan:
        """Cut spans where blocks end that have a row for their state.

        `rows_of` gives the arena's rows of blocks, `ABSENT` for those without, and the blocks themselves where all have
        their own. The last block of a span has one, and so has that of the token before it.
        """
        single: list[Segment] = []
        others: list[Segment] = []
        row = 0
        for index, span in enumerate(spans):
            segments = _segments(index, span, row, block_tokens, rows_of)
            is_single = len(segments) == 1 and span.num_rows == 1 and span.start > 0
            (single if is_single else others).extend(segments)
            row += span.num_rows
        together = [Group(tuple(single))] if single else []
        return cls((*together, *(Group((segment,)) for segment in others)))


def _segments(
    index: int, span: SequenceSpan, row: int, block_tokens: int, rows_of: Callable[[np.ndarray], np.ndarray]
) -> list[Segment]:
    """Cut one span, whose first row in the step is `row`."""
    position, end = span.start, span.start + span.num_rows
    first, last = max(0, position - 1) // block_tokens, (end - 1) // block_tokens
    blocks = np.asarray(span.blocks[first : last + 1], np.int32)
    found = rows_of(blocks)
    rows, all_have_one = found.tolist(), found is blocks
    segments: list[Segment] = []
    for block in range(position // block_tokens, last + 1):
        until = min(end, (block + 1) * block_tokens)
        target = rows[block - first]
        if until < end and target == ABSENT and not all_have_one:
            continue
        source = None if position == 0 else rows[(position - 1) // block_tokens - first]
        assert all_have_one or ABSENT not in (source, target), f"a state of span {index} at {position} has no place"
        segments.append(Segment(index, row, until - position, source, target))
        row += until - position
        position = until
    return segments
