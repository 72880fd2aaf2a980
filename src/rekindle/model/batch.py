"""One step's rows: several sequences, concatenated and, for torch, padded to a multiple of four.

Torch's matrix products with fewer than four rows run other kernels and give other bits, so both the rows of the step
and the rows that become logits are padded with dummies, which are never written and never returned. A model whose
layers and head our kernels compute needs none.

    steps     |--- A: 5 rows ---|- B: 1 -|-- C: 4 --|. .|       10 rows + 2 dummies
    positions  7 8 9 10 11        30       0 1 2 3   0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rekindle.kv.plan import ROW_MULTIPLE
from rekindle.kv.step_layout import SequenceSpan


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """Rows of one sequence for one step.

    `token_ids` are at positions `start`...; `blocks` hold positions 0 to at least the last row; positions below
    `num_stored` are computed but not written (their KV is there already). `logits`: of no row, the last, or all.
    """

    token_ids: np.ndarray
    start: int
    blocks: Sequence[int]
    num_stored: int
    logits: Literal["none", "last", "all"]

    @property
    def num_rows(self) -> int:
        """Rows to compute, at least one."""
        return len(self.token_ids)


def filled_up(count: int, row_multiple: int) -> int:
    """The next multiple; 0 stays 0."""
    return -(-count // row_multiple) * row_multiple


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The tensors of one step; `logit_rows` may be padded, its first `num_logits` entries are the requested rows."""

    input_ids: torch.Tensor  # [1, rows]
    position_ids: torch.Tensor  # [1, rows]
    spans: tuple[SequenceSpan, ...]
    logit_rows: torch.Tensor
    num_logits: int

    @property
    def num_rows(self) -> int:
        """Rows with dummies."""
        return int(self.input_ids.shape[1])

    @classmethod
    def build(
        cls, steps: Sequence[SequenceStep], device: torch.device, *, row_multiple: int = ROW_MULTIPLE
    ) -> ForwardBatch:
        """Concatenate the steps; cost linear in rows."""
        total = sum(step.num_rows for step in steps)
        rows = np.zeros((2, 1, filled_up(total, row_multiple)), dtype=np.int64)
        asked: list[int] = []
        at = 0
        for step in steps:
            assert step.num_rows > 0, "a step without rows"
            end = at + step.num_rows
            rows[0, 0, at:end] = step.token_ids
            rows[1, 0, at:end] = np.arange(step.start, step.start + step.num_rows)
            if step.logits != "none":
                asked.extend(range(at if step.logits == "all" else end - 1, end))
            at = end
        spans = tuple(SequenceSpan(step.blocks, step.start, step.num_rows, step.num_stored) for step in steps)
        padded = asked + asked[-1:] * (filled_up(len(asked), row_multiple) - len(asked))
        tensors = torch.from_numpy(rows).to(device)
        return cls(tensors[0], tensors[1], spans, torch.tensor(padded, dtype=torch.int64, device=device), len(asked))
