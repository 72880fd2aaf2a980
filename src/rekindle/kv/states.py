"""The states of recurrent layers in one step: which rows go on from which state, and where the state after them goes.

    a span       [start ............................. end)
    segments     [start .... b) [b ........ c) [c ... end)      b, c: ends of blocks whose state is kept

Nothing is written while the model runs: a pass that fails, or a sequence whose numbers are not finite, leaves the state
before it. Knows neither what a state means nor who may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rekindle.cache.blocks.windows import ABSENT
from rekindle.kv.arena import KVArena


class Span(Protocol):
    """Rows of a sequence at positions `start`..., which lie in `blocks`."""

    @property
    def blocks(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def num_rows(self) -> int: ...


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
    def build(cls, spans: Sequence[Span], block_tokens: int, rows_of: Callable[[np.ndarray], np.ndarray]) -> StatePlan:
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
    index: int, span: Span, row: int, block_tokens: int, rows_of: Callable[[np.ndarray], np.ndarray]
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


class StepStates:
    """The states of one step over an arena. Used by the thread that runs it."""

    def __init__(self, arena: KVArena, plan: StatePlan) -> None:
        self.plan = plan
        self._arena = arena
        self._kept: list[tuple[int, Group, tuple[Tensor, ...]]] = []
        self._last: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # of single segments, by layer and target
        self._are_finite: list[tuple[Group, Tensor]] = []

    def load(self, layer_index: int, group: Group) -> tuple[Tensor, ...]:
        """Copy the tensors of a layer's state before a group, each [segments, *shape]."""
        sources = [segment.source for segment in group.segments]
        kept = self._last.get((layer_index, sources[0])) if len(sources) == 1 and sources[0] is not None else None
        if kept is not None:
            return tuple(tensor.clone() for tensor in kept)
        rows = torch.tensor(sources, device=self._arena.device)
        return tuple(tensor.index_select(0, rows) for tensor in self._arena.states(layer_index))

    def keep(self, layer_index: int, group: Group, tensors: tuple[Tensor, ...]) -> None:
        """Take over the tensors of a layer's state after a group, each [segments, *shape]; `commit` writes them."""
        self._kept.append((layer_index, group, tensors))
        if len(group.segments) == 1:
            self._last[layer_index, group.segments[0].target] = tensors
        self._are_finite += [
            (group, tensor.flatten(1).sum(1, dtype=_sum_dtype(tensor)).isfinite()) for tensor in tensors
        ]

    def failed_spans(self) -> set[int]:
        """Spans with a state that is not finite."""
        return {
            segment.span
            for group, are_finite in self._are_finite
            for segment, is_finite in zip(group.segments, are_finite.tolist(), strict=True)
            if not is_finite
        }

    def commit(self, failed: Collection[int]) -> None:
        """Write what was kept, but for spans that failed: all of it, or nothing if memory for that is short."""
        ready: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer_index, group, tensors in self._kept:
            good = [at for at, segment in enumerate(group.segments) if segment.span not in failed]
            targets = [group.segments[at].target for at in good]
            at = torch.tensor(targets, dtype=torch.int64, device=self._arena.device)
            chosen = tensors if len(good) == len(group.segments) else tuple(tensor[good] for tensor in tensors)
            ready += ((rows, at, new) for rows, new in zip(self._arena.states(layer_index), chosen, strict=True))
        for rows, at, new in ready:
            rows.index_copy_(0, at, new)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """A dtype in which sums of finite values stay finite."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
