"""Which pieces of which contexts a step's rows attend to: the work items of `attend`.

    positions of a sequence   |<-- piece -->|<-- piece -->|<-- piece -->|
    rows of one tile                                          [ . . . . )     three items, joined for each row

Owns how a context is cut: at multiples of a size that depends on a row's own position, so that the sums of a row are
the same in every step and company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kv.step_layout import SequenceSpan, StepLayout

FIELDS = 6  # of a work item: table, first row, number of rows, position of the first row, first token, end
LEAST_FOLDED, MOST_FOLDED = 16, 32  # rows times query heads of a K/V head that a program computes together
MOST_ITEMS = 4096  # of a launch, unless one tile has more: each has partial sums in memory
PIECES = ((1024, 64), (8192, 128), (16384, 256), (65536, 512))  # rows before these positions: pieces of so many tokens
LONGEST_PIECE = 1024


class Shape(NamedTuple):
    """What attention is compiled for, apart from the forms of K and V."""

    kv_heads: int
    shared: int  # query heads of a K/V head
    tokens: int  # of a block
    tile: int  # tokens that are read at a time
    folded: int  # rows of an item, times query heads of a K/V head
    window: int  # 0: full attention
    softcap: bool
    dtype: tl.dtype


class Work(NamedTuple):
    """The items of a launch; int32 on the device."""

    tables: Tensor  # rows of the arena, of all sequences: an item has the place of its own
    items: Tensor  # [items, FIELDS]
    num_items: Tensor


class Partial(NamedTuple):
    """What `attend_kernel` leaves for `join_kernel`."""

    sums: Tensor  # fp32 [items, kv heads, folded, dim of V], in two halves
    extremes: Tensor  # fp32 [items, kv heads, folded, 2]: the largest score and the sum of weights


@dataclass(frozen=True, slots=True)
class Items:
    """The work of one launch: see `attend_kernel` and `join_kernel`."""

    count: int
    folded: int
    work: Work
    pieces: Tensor


@dataclass(slots=True)
class _Launch:
    """Items of tiles with one number of folded rows, as lists."""

    folded: int
    items: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)

    def sent(self, tables: Tensor, device: torch.device) -> Items:
        """All of it in one copy to the device."""
        items, pieces = np.array(self.items, np.int32), np.array(self.pieces, np.int32)
        together = np.concatenate((np.array([len(items)], np.int32), items.ravel(), pieces.ravel()))
        count, own, rows = torch.from_numpy(together).to(device).split((1, items.size, pieces.size))
        return Items(len(items), self.folded, Work(tables, own.view(items.shape), count), rows.view(pieces.shape))


def items_of(
    layout: StepLayout, window: int | None, shared: int, most_rows: int | None, device: torch.device
) -> list[Items]:
    """The launches of a step for layers of a window whose K/V heads are shared by so many query heads each; without
    spans of more than `most_rows`."""
    contexts = [layout.context(window, span) for span in layout.spans]
    starts = np.cumsum([0, *(len(each) for each in contexts)])
    tables = torch.from_numpy(np.concatenate(contexts)).to(device)
    open_, done = dict[int, _Launch](), list[_Launch]()
    for (row, span), table in zip(layout.rows_of_spans(), starts.tolist(), strict=False):
        if most_rows is not None and span.num_rows > most_rows:
            continue
        least = LEAST_FOLDED if span.num_rows * shared <= LEAST_FOLDED else MOST_FOLDED
        folded = max(triton.next_power_of_2(shared), least)
        for position, until in _tiles(span, folded // shared):
            launch = open_.setdefault(folded, _Launch(folded))
            first_row, first = row + position - span.start, len(launch.items)
            cuts = _cuts(position, until, window)
            rows = range(until - position)
            launch.items += [(table, first_row, len(rows), position, begin, end) for begin, end in cuts]
            launch.pieces += [(first, len(cuts), each, first_row + each) for each in rows]
            if len(launch.items) >= MOST_ITEMS:
                done.append(open_.pop(folded))
    return [each.sent(tables, device) for each in (*done, *open_.values())]


def _tiles(span: SequenceSpan, rows: int) -> Iterator[tuple[int, int]]:
    """Positions [first, end) of at most `rows` rows whose pieces have one size."""
    position, end = span.start, span.start + span.num_rows
    while position < end:
        border = next((limit for limit, _ in PIECES if position < limit), end)
        until = min(end, border, position + rows)
        yield position, until
        position = until


def _cuts(position: int, until: int, window: int | None) -> list[tuple[int, int]]:
    """The pieces of the context of these rows, from the first token that one of them may see."""
    size = next((size for limit, size in PIECES if position < limit), LONGEST_PIECE)
    oldest = 0 if window is None else max(0, position - window + 1)
    return [(begin, min(begin + size, until)) for begin in range(oldest // size * size, until, size)]
