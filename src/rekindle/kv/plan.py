"""A step on a device of torch's: its layout, and the tensors by which `PagedAttention` writes rows and reads tiles.

Built once per step and shared by all layers; masks are built at first use, per window. Knows no layer's bytes.

    a sequence       |<------ context tiles of TILE tokens, from position 0 ------>|
    its rows                                   [start ......... start + num_rows)
    a query range    rows of one sequence whose positions lie in one tile, with the tiles that they may see
    a piece          rows of a range, few enough that their scores stay small; bits do not depend on the split

Ranges end at tile borders, so no row attends to more than one tile of masked positions, and a row's context always
starts at a multiple of TILE, whatever else is computed alongside. Rows that see each other are a range of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from rekindle.kv.step_layout import SequenceSpan, StepLayout

TILE = 512
ROW_MULTIPLE = 4  # torch's matrix products change their bits below 4 rows
# Scores of a piece, all heads. On a CPU 4 MiB in bf16: from 1 to 4 M the cost per score is the same. Elsewhere fewer
# and larger operations: 32k tokens leave 4 rows to a piece of a CPU's size.
MOST_SCORES = {"cpu": 1 << 21}
MOST_SCORES_ELSEWHERE = 1 << 26


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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Positions `position .. until` of a sequence, which are the step's rows from `row` on.

    `sees`: where the positions end that all of them see; None: each up to itself.
    """

    row: int
    position: int
    until: int
    sees: int | None

    def part(self, position: int, num_rows: int) -> _Rows:
        row = self.row + position - self.position
        return _Rows(row, position, min(self.until, position + num_rows), self.sees)


class AttentionPlan:
    """What a step's rows are written to and see, as tensors; `worst` collects the largest magnitude in each row.

    `worst`: that of a step that was computed elsewhere.
    """

    def __init__(self, layout: StepLayout, device: torch.device | str, worst: Tensor | None = None) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self._target_blocks: dict[int | None, Tensor] = {}
        with torch.inference_mode(False):
            # torch's default dtype is the process's, and another model's while that is loaded.
            fresh = partial(torch.zeros, layout.num_rows, dtype=torch.float32, device=self.device)
            self.worst = fresh() if worst is None else worst
        self._ranges: dict[ScoreShape, tuple[QueryRange, ...]] = {}

    @cached_property
    def written(self) -> Tensor | None:
        """Indices of the rows that are written; None if all are, as in most steps: no gather is needed."""
        layout = self.layout
        return None if layout.num_written == layout.num_rows else self._constant(np.flatnonzero(layout.written))

    def target_blocks(self, window: int | None) -> Tensor:
        """As `StepLayout.row_blocks`, of the written rows alone: [written rows, 1]."""
        if window not in self._target_blocks:
            targets = self.layout.row_blocks(window)[self.layout.written, None].astype(np.int64)
            self._target_blocks[window] = self._constant(targets)
        return self._target_blocks[window]

    @cached_property
    def target_offsets(self) -> Tensor:
        """The token inside its block of every written row, [written rows, 1]."""
        return self._constant(self.layout.row_offsets[self.layout.written, None].astype(np.int64))

    def _constant(self, values: np.ndarray) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(values).to(self.device)

    def failed_spans(self, worst: np.ndarray | None = None) -> list[int]:
        """Spans with a K or V that is not finite, after the step's last layer; `worst`: as read, else it is read."""
        bad = ~np.isfinite(self.worst.cpu().numpy() if worst is None else worst)
        failed, row = [], 0
        for index, span in enumerate(self.layout.spans):
            if any(bad[row : row + span.num_rows]):
                failed.append(index)
            row += span.num_rows
        return failed

    def ranges(self, shape: ScoreShape) -> tuple[QueryRange, ...]:
        """The query ranges of all spans, masks included; built once per shape."""
        if shape not in self._ranges:
            with torch.inference_mode(False):
                self._ranges[shape] = tuple(self._make_ranges(shape))
        return self._ranges[shape]

    def _make_ranges(self, shape: ScoreShape) -> list[QueryRange]:
        ranges, row = list[QueryRange](), 0
        for span in self.layout.spans:
            for run in span.runs():
                position, sees = run.first, run.end if run.is_mutual else None
                while position < run.end:
                    until = sees or min(run.end, (position // TILE + 1) * TILE)
                    ranges.append(self._range(span, _Rows(row, position, until, sees), shape))
                    row += until - position
                    position = until
        return ranges

    def _range(self, span: SequenceSpan, rows: _Rows, shape: ScoreShape) -> QueryRange:
        oldest = 0 if shape.window is None else max(0, rows.position - shape.window + 1)
        first = oldest // TILE * TILE
        num_context = -(-rows.until // TILE) * TILE - first
        blocks = slice(first // self.layout.block_tokens, -(-rows.until // self.layout.block_tokens))
        table = self.layout.context(shape.window, span)[blocks]
        most = MOST_SCORES.get(self.device.type, MOST_SCORES_ELSEWHERE)
        per_piece = most // (num_context * shape.heads_per_kv * shape.num_kv_heads)
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
        hidden = context > (positions if rows.sees is None else torch.full_like(positions, rows.sees - 1))
        if shape.window is not None:
            hidden |= context <= positions - shape.window
        mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=self.device)
        return QueryPiece(rows.row, num_rows, mask.masked_fill_(hidden, -torch.inf), masked_from)
