"""Which pieces of which contexts a step's rows attend to: the work items of `attend`.

    positions of a sequence   |<-- piece -->|<-- piece -->|<-- piece -->|
    rows of one tile                                          [ . . . . )     three items, joined for each row

Owns how a context is cut: at multiples of a size that depends on a row's own position, so that the sums of a row are
the same in every step and company. Arrays alone: `tables` brings them to the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kv.step_layout import Run, SequenceSpan, StepLayout

FIELDS = 7  # of a work item: table, first row, number of rows, position of the first, what all see, first token, end
PIECE_FIELDS = 4  # of a row: its first item, the number of its items, its place among their rows, its place in the step
LEAST_FOLDED, MOST_FOLDED = 16, 32  # rows times query heads of a K/V head that a program computes together
MOST_ITEMS = 2048  # of a launch, unless one tile has more: partial sums of each take up to 0.26 MB
LIMITS = np.array([1024, 8192, 16384, 65536])  # rows before these positions have pieces of so many tokens
PIECES = np.array([64, 128, 256, 512, 1024])


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


class Use(NamedTuple):
    """Attention of layers, as far as the work of a step depends on it."""

    window: int | None
    shared: int  # query heads of a K/V head
    most_rows: int | None  # of a span that is not left out; None: none is

    def takes(self, span: SequenceSpan) -> bool:
        """Whether the work has a span's rows: many at once are left out, unless some of them see each other."""
        return self.most_rows is None or span.num_rows <= self.most_rows or bool(span.mutual)


class Launch(NamedTuple):
    """The work of one launch: see `attend_kernel` and `join_kernel`."""

    folded: int
    items: np.ndarray  # int32 [items, FIELDS]
    pieces: np.ndarray  # int32 [rows, PIECE_FIELDS]


def launches(layout: StepLayout, use: Use) -> list[Launch]:
    """The launches of a step; rows that nobody reads are among those of the first, without items."""
    # By folded: table, first row, rows, first position, and the end of what all of them see, 0: each up to itself.
    tiles: dict[int, list[tuple[int, int, int, int, int]]] = {}
    table = 0
    for row, span in layout.rows_of_spans():
        if use.takes(span):
            least = LEAST_FOLDED if span.num_rows * use.shared <= LEAST_FOLDED else MOST_FOLDED
            folded = max(triton.next_power_of_2(use.shared), least)
            own = tiles.setdefault(folded, [])
            for run in span.runs():
                sees = run.end if run.is_mutual else 0
                for position, until in _tiles(run, folded // use.shared):
                    own.append((table, row + position - span.start, until - position, position, sees))
        table += len(span.blocks)
    found = [launch for folded, own in tiles.items() for launch in _launches(folded, np.array(own), use.window)]
    unread = np.arange(layout.num_used, layout.num_rows)
    if len(unread):
        none = np.zeros((0, FIELDS), np.int32), np.zeros((0, PIECE_FIELDS), np.int32)
        first = found[0] if found else Launch(LEAST_FOLDED, *none)
        rest = _stacked(*np.zeros((PIECE_FIELDS - 1, len(unread)), np.int32), unread)
        found[:1] = [first._replace(pieces=np.concatenate((first.pieces, rest)))]
    return found


def _tiles(run: Run, rows: int) -> Iterator[tuple[int, int]]:
    """Positions [first, end) of at most `rows` rows whose pieces have one size."""
    position, end = run.first, run.end
    while position < end:
        border = next((limit for limit in LIMITS.tolist() if position < limit), end)
        until = min(end, border, position + rows)
        yield position, until
        position = until


def _launches(folded: int, tiles: np.ndarray, window: int | None) -> Iterator[Launch]:
    """The items of tiles [tiles, 5], from the first token that one of a tile's rows may see."""
    position, until = tiles[:, 3], np.maximum(tiles[:, 2] + tiles[:, 3], tiles[:, 4])
    size = PIECES[np.searchsorted(LIMITS, position, side="right")]
    oldest = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    first = oldest // size * size
    cuts = -(-(until - first) // size)
    group = (np.cumsum(cuts) - cuts) // MOST_ITEMS
    for own in np.split(np.arange(len(tiles)), np.flatnonzero(np.diff(group)) + 1):
        tile, nth = _repeated(own, cuts)
        begin = first[tile] + nth * size[tile]
        items = _stacked(*tiles[tile].T, begin, np.minimum(begin + size[tile], until[tile]))
        starts = np.zeros_like(cuts)
        starts[own] = np.cumsum(cuts[own]) - cuts[own]
        tile, nth = _repeated(own, tiles[:, 2])
        yield Launch(folded, items, _stacked(starts[tile], cuts[tile], nth, tiles[tile, 1] + nth))


def _repeated(own: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of these tiles as often as it counts, and the numbers from 0 on for each."""
    counts = counts[own]
    return np.repeat(own, counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _stacked(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, 1).astype(np.int32)
