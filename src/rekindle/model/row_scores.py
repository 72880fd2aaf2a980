"""Log probabilities of tokens, one in each row of logits, and of the likeliest ones there, in arrays.

Raw: before temperature, penalties and bias. Computed only for the rows that request them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rekindle.model.logprobs import TokenLogprob
from rekindle.model.transfer import Readback, to_device

ARRAYS = 4  # of `RowScores`
ROWS_AT_ONCE = 32  # of a vocabulary in fp32: 20 MB at 150,000 tokens


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """Of each row: the log probability of its token, its rank, and the likeliest tokens, ties by id.

    `logprobs` f32 [rows], `ranks` i32 [rows], `top_ids` u32 [rows, top], `top_logprobs` f32 [rows, top].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, num_top: int) -> RowScores:
        """Return scores of rows that are filled in later."""
        return cls(
            np.zeros(num_rows, np.float32),
            np.zeros(num_rows, np.int32),
            np.zeros((num_rows, num_top), np.uint32),
            np.zeros((num_rows, num_top), np.float32),
        )

    @property
    def num_top(self) -> int:
        """Likeliest tokens of each row."""
        return self.top_ids.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays())

    def put(self, first: int, rows: RowScores) -> None:
        """Overwrite the rows from `first` on with scores that have at least as many likeliest tokens."""
        for mine, given in zip(self._arrays(), rows._arrays(), strict=True):
            mine[first : first + len(given)] = given if given.ndim == 1 else given[:, : self.num_top]

    def copy(self, first: int, end: int) -> RowScores:
        """Return a copy of the rows [first, end)."""
        return RowScores(*(array[first:end].copy() for array in self._arrays()))

    def token(
        self, at: int, token: int, bytes_of: Callable[[int], bytes], *, num_top: int | None = None
    ) -> TokenLogprob:
        """Return row `at`, whose token this is, with its first `num_top` likeliest tokens, or all."""
        ids, logprobs = self.top_ids[at, :num_top].tolist(), self.top_logprobs[at, :num_top].tolist()
        top = tuple(
            TokenLogprob(each, logprob, bytes_of(each), rank=rank)
            for rank, (each, logprob) in enumerate(zip(ids, logprobs, strict=True), 1)
        )
        return TokenLogprob(token, float(self.logprobs[at]), bytes_of(token), top, int(self.ranks[at]))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


def score_rows(logits: torch.Tensor, tokens: np.ndarray, num_top: int) -> RowScores:
    """The scores of one token in each row of `logits` [rows, vocab], and of the `num_top` likeliest.

    Computed a few rows at a time, and read at once.
    """
    (on_device,) = to_device([tokens.astype(np.int64)], logits.device)
    parts: list[torch.Tensor] = []
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        parts += raw_scores(logits[some], on_device[some], num_top)
    arrays = Readback(parts).arrays()
    found = RowScores.empty(len(tokens), min(num_top, logits.shape[1]))
    for at in range(0, len(arrays), ARRAYS):
        found.put(at // ARRAYS * ROWS_AT_ONCE, RowScores(*arrays[at : at + ARRAYS]))
    return found


def raw_scores(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """The arrays of some rows as tensors on their device, in fp32; `tokens` int64 [rows]. Waits for nothing."""
    scores = logits.float().log_softmax(dim=1)
    logprobs = scores.gather(1, tokens[:, None])
    ranks = (scores > logprobs).sum(dim=1, dtype=torch.int32) + 1
    ids = _largest(scores, min(num_top, scores.shape[1]))
    return logprobs[:, 0], ranks, ids.to(torch.int32), scores.gather(1, ids)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids int64 [rows, count] of the largest fp32 scores of each row, descending, ties by id.

    Orders whole numbers: the bits of a score, which for negative ones count down, and after them the id.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 is 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << 32
    last = scores.shape[1] - 1
    keys = order + torch.arange(last, -1, -1, device=scores.device)
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
