"""One step's rows: several sequences, concatenated and, for torch, padded to a multiple of four.

Torch's matrix products with fewer than four rows run other kernels and give other bits, so both the rows of the step
and the rows that become logits are padded with dummies, which are never written and never returned. A model whose
layers and head our kernels compute needs none.

    steps     |--- A: 5 rows ---|- B: 1 -|-- C: 4 --|. .|       10 rows + 2 dummies
    positions  7 8 9 10 11        30       0 1 2 3   0 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from rekindle.kv.plan import ROW_MULTIPLE
from rekindle.kv.step_layout import SequenceSpan
from rekindle.model.transfer import to_device
from rekindle.text.pictures import PictureSpan


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """Rows of one sequence for one step.

    `token_ids` are at positions `start`...; `blocks` hold positions 0 to at least the last row; positions below
    `num_stored` are computed but not written (their KV is there already). `logits`: of no row, the last, or all.
    `pictures`: which rows, counted from the first, are of pictures; their ids are not looked up.
    """

    token_ids: np.ndarray
    start: int
    blocks: Sequence[int]
    num_stored: int
    logits: Literal["none", "last", "all"]
    pictures: tuple[PictureSpan, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows to compute, at least one."""
        return len(self.token_ids)

    @property
    def span(self) -> SequenceSpan:
        """Its rows against its blocks."""
        firsts = ((self.start + each.at, each.count) for each in self.pictures if each.is_mutual)
        mutual = tuple((first, first + count) for first, count in firsts)
        return SequenceSpan(self.blocks, self.start, self.num_rows, self.num_stored, mutual)


def filled_up(count: int, row_multiple: int = ROW_MULTIPLE) -> int:
    """The next multiple; 0 stays 0."""
    return -(-count // row_multiple) * row_multiple


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The inputs of one step; `logit_rows` may be padded, its first `num_logits` entries are the requested rows.

    `drawn`: ids int64 of the first rows that are on a device, in place of `input_ids`. `pictures` are at these rows.
    """

    input_ids: np.ndarray  # int64 [rows]
    position_ids: np.ndarray  # int64 [rows]
    spans: tuple[SequenceSpan, ...]
    logit_rows: np.ndarray  # int64
    num_logits: int
    drawn: torch.Tensor | None = None
    pictures: tuple[PictureSpan, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows with dummies."""
        return len(self.input_ids)

    @classmethod
    def build(cls, steps: Sequence[SequenceStep], filled: Callable[[int], int] = filled_up) -> ForwardBatch:
        """Concatenate the steps; cost linear in rows. `filled`: with how many rows so many are computed."""
        total = sum(step.num_rows for step in steps)
        rows = np.zeros((2, filled(total)), dtype=np.int64)
        asked, pictures = list[int](), list[PictureSpan]()
        at = 0
        for step in steps:
            assert step.num_rows > 0, "a step without rows"
            end = at + step.num_rows
            rows[0, at:end] = step.token_ids
            rows[1, at:end] = np.arange(step.start, step.start + step.num_rows)
            pictures += [replace(span, at=at + span.at) for span in step.pictures]
            if step.logits != "none":
                asked.extend(range(at if step.logits == "all" else end - 1, end))
            at = end
        padded = asked + asked[-1:] * (filled(len(asked)) - len(asked))
        spans = tuple(step.span for step in steps)
        return cls(rows[0], rows[1], spans, np.array(padded, dtype=np.int64), len(asked), None, tuple(pictures))

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [1, rows], positions [1, rows] and the rows that become logits, on a device."""
        ids, positions, logit_rows = to_device([self.input_ids, self.position_ids, self.logit_rows], device)
        if self.drawn is not None:
            ids = torch.cat((self.drawn, ids[len(self.drawn) :]))
        return ids[None], positions[None], logit_rows
