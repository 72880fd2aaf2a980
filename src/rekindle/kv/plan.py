"""One step's rows against the block tables: which bytes each row writes and which it may read.

Built once per step and shared by all layers; masks are built at first use, per window. Knows no layer's bytes.

    a sequence       |<------ context tiles of TILE tokens, from position 0 ------>|
    its rows                                   [start ......... start + num_rows)
    a query range    rows of one sequence whose positions lie in one tile, with the tiles that they may see
    a piece          rows of a range, few enough that their scores stay small; bits do not depend on the split

Ranges end at tile borders, so no row attends to more than one tile of masked positions, and a row's context always
starts at a multiple of TILE, whatever else is computed alongside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rekindle.kv.states import StatePlan
from rekindle.spec import STATE_WINDOW, KVLayout

TILE = 512
ROW_MULTIPLE = 4  # torch's matrix products change their bits below 4 rows
MAX_SCORES = 1 << 21  # of a piece, all heads: 4 MiB in bf16; from 1 to 4 M scores the cost per score is the same


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Rows `start .. start + num_rows` of a sequence whose positions lie in `blocks`.

    Rows at positions below `num_stored` are computed, not written: their KV is in the blocks already.
    """

    blocks: Sequence[int]
    start: int
    num_rows: int
    num_stored: int


@dataclass(frozen=True, slots=True)
class QueryPiece:
    """Rows `row .. row + num_rows` of the step; `mask` [folded rows, context - masked_from] holds 0 or -inf."""

    row: int
    num_rows: int
    mask: Tensor
    masked_from: int


@dataclass(frozen=True, slots=True)
class QueryRange:
    """Pieces that see the same context: `blocks` int32 [n], rows of the arena, from position `first`, padded to
    `num_context` tokens."""

    blocks: Tensor
    first: int
    num_context: int
    pieces: tuple[QueryPiece, ...]


@dataclass(frozen=True, slots=True)
class ScoreShape:
    """What masks depend on, except the rows: query heads per K/V head, K/V heads, window and dtype of the scores."""

    heads_per_kv: int
    num_kv_heads: int
    window: int | None
    dtype: torch.dtype


def same_rows(window: int | None, blocks: np.ndarray) -> np.ndarray:
    """The rows of blocks where every block has one in each part, its own."""
    return blocks


@dataclass(frozen=True, slots=True)
class _Rows:
    """Positions `position .. until` of a sequence, which are the step's rows from `row` on."""

    row: int
    position: int
    until: int

    def part(self, position: int, num_rows: int) -> _Rows:
        return _Rows(self.row + position - self.position, position, min(self.until, position + num_rows))


class AttentionPlan:
    """Where a step's rows are written and what they see; `worst` collects the largest magnitude in each row.

    `rows_of` gives the arena's rows of blocks for a window, as `KVArena.rows_of`.
    """

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        layout: KVLayout,
        num_rows: int,
        device: torch.device,
        rows_of: Callable[[int | None, np.ndarray], np.ndarray],
    ) -> None:
        self.spans = tuple(spans)
        self.num_rows = num_rows
        self.block_tokens = layout.block_tokens
        self.device = device
        self.num_used = sum(span.num_rows for span in self.spans)
        positions, blocks, written = self._rows()
        self._blocks, self._written, self._rows_of = blocks, written, rows_of
        self._targets: dict[int | None, np.ndarray] = {}
        self._target_blocks: dict[int | None, Tensor] = {}
        self.row_offsets = (positions % self.block_tokens).astype(np.int32)
        self.num_written = int(written.sum())
        with torch.inference_mode(False):
            # torch's default dtype is the process's, and another model's while that is loaded.
            self.worst = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._ranges: dict[ScoreShape, tuple[QueryRange, ...]] = {}

    @cached_property
    def written(self) -> Tensor | None:
        """Indices of the rows that are written; None if all are, as in most steps: no gather is needed."""
        return None if self.num_written == self.num_rows else self._constant(np.flatnonzero(self._written))

    def row_blocks(self, window: int | None) -> np.ndarray:
        """Where each row is written in the part of a window, int32 [rows]: a row of the arena, -1 if it is not."""
        if window not in self._targets:
            targets = np.where(self._written, self._rows_of(window, self._blocks), -1)
            self._targets[window] = targets.astype(np.int32)
        return self._targets[window]

    def context(self, window: int | None, span: SequenceSpan) -> np.ndarray:
        """The arena's rows of a span's blocks in the part of a window, int32 [blocks]."""
        return self._rows_of(window, np.asarray(span.blocks, np.int32)).astype(np.int32, copy=False)

    def target_blocks(self, window: int | None) -> Tensor:
        """As `row_blocks`, of the written rows alone: [written rows, 1]."""
        if window not in self._target_blocks:
            targets = self.row_blocks(window)[self._written, None].astype(np.int64)
            self._target_blocks[window] = self._constant(targets)
        return self._target_blocks[window]

    @cached_property
    def target_offsets(self) -> Tensor:
        """The token inside its block of every written row, [written rows, 1]."""
        return self._constant(self.row_offsets[self._written, None].astype(np.int64))

    def _constant(self, values: np.ndarray) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(values).to(self.device)

    @classmethod
    def build(
        cls,
        spans: Sequence[SequenceSpan],
        layout: KVLayout,
        num_rows: int,
        device: torch.device | str,
        rows_of: Callable[[int | None, np.ndarray], np.ndarray] = same_rows,
    ) -> AttentionPlan:
        """Plan rows in the order of `spans`, padded to `num_rows` with rows that nothing reads.

        ValueError if rows do not fit, a span is empty, or blocks are missing for its positions.
        """
        used = sum(span.num_rows for span in spans)
        if used > num_rows:
            raise ValueError(f"{used} rows do not fit a step of {num_rows}")
        for span in spans:
            if span.num_rows < 1 or span.start < 0:
                raise ValueError(f"a span needs at least one row from position 0 on: {span.num_rows} at {span.start}")
            if len(span.blocks) * layout.block_tokens < span.start + span.num_rows:
                raise ValueError(f"{len(span.blocks)} blocks do not hold position {span.start + span.num_rows - 1}")
        return cls(spans, layout, num_rows, torch.device(device), rows_of)

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

    def failed_spans(self) -> list[int]:
        """Spans with a K or V that is not finite; call once, after the step's last layer (waits for the device)."""
        bad = (~self.worst.isfinite()).tolist()
        failed, row = [], 0
        for index, span in enumerate(self.spans):
            if any(bad[row : row + span.num_rows]):
                failed.append(index)
            row += span.num_rows
        return failed

    @cached_property
    def states(self) -> StatePlan:
        """Where the states of recurrent layers come from and go to."""
        return StatePlan.build(self.spans, self.block_tokens, lambda blocks: self._rows_of(STATE_WINDOW, blocks))

    def ranges(self, shape: ScoreShape) -> tuple[QueryRange, ...]:
        """The query ranges of all spans, masks included; built once per shape."""
        if shape not in self._ranges:
            with torch.inference_mode(False):
                self._ranges[shape] = tuple(self._make_ranges(shape))
        return self._ranges[shape]

    def _make_ranges(self, shape: ScoreShape) -> list[QueryRange]:
        ranges, row = [], 0
        for span in self.spans:
            position, end = span.start, span.start + span.num_rows
            while position < end:
                until = min(end, (position // TILE + 1) * TILE)
                ranges.append(self._range(span, _Rows(row, position, until), shape))
                row += until - position
                position = until
        return ranges

    def _range(self, span: SequenceSpan, rows: _Rows, shape: ScoreShape) -> QueryRange:
        oldest = 0 if shape.window is None else max(0, rows.position - shape.window + 1)
        first = oldest // TILE * TILE
        num_context = -(-rows.until // TILE) * TILE - first
        blocks = slice(first // self.block_tokens, -(-rows.until // self.block_tokens))
        table = self.context(shape.window, span)[blocks]
        per_piece = MAX_SCORES // (num_context * shape.heads_per_kv * shape.num_kv_heads)
        per_piece = max(ROW_MULTIPLE, per_piece // ROW_MULTIPLE * ROW_MULTIPLE)
        pieces = tuple(
            self._piece(rows.part(start, per_piece), first, num_context, shape=shape)
            for start in range(rows.position, rows.until, per_piece)
        )
        return QueryRange(torch.tensor(table, device=self.device), first, num_context, pieces)

    def _piece(self, rows: _Rows, first: int, num_context: int, *, shape: ScoreShape) -> QueryPiece:
        """Fold rows as (row, query head of the K/V head), then repeat the last row up to a multiple of 4."""
        num_rows = rows.until - rows.position
        num_folded = num_rows * shape.heads_per_kv
        padded = -(-num_folded // ROW_MULTIPLE) * ROW_MULTIPLE
        folded = torch.arange(padded, device=self.device).clamp_(max=num_folded - 1)
        positions = (folded // shape.heads_per_kv + rows.position).unsqueeze(1)
        # Without a window every row sees all positions before the piece: no need to mask those.
        masked_from = (rows.position - first) // 64 * 64 if shape.window is None else 0
        context = torch.arange(first + masked_from, first + num_context, device=self.device)
        hidden = context > positions
        if shape.window is not None:
            hidden |= context <= positions - shape.window
        mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=self.device)
        return QueryPiece(rows.row, num_rows, mask.masked_fill_(hidden, -torch.inf), masked_from)
