"""Scores of many tokens at once: those of a prompt, one in each row of logits.

The same values as `logprobs.score` gives a row at a time, in arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rekindle.model.logprobs import largest

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

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.logprobs, self.ranks, self.top_ids, self.top_logprobs


def score_rows(logits: torch.Tensor, tokens: np.ndarray, num_top: int) -> RowScores:
    """The scores of one token in each row of `logits` [rows, vocab], and of the `num_top` likeliest; as `score` gives
    them, a few rows at a time."""
    num_top = min(num_top, logits.shape[1])
    found = RowScores.empty(len(tokens), num_top)
    for first in range(0, len(tokens), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        scores = logits[some].float().log_softmax(dim=1)
        own = torch.from_numpy(tokens[some].astype(np.int64)).to(scores.device)[:, None]
        logprobs = scores.gather(1, own)
        found.logprobs[some] = logprobs[:, 0].cpu().numpy()
        found.ranks[some] = ((scores > logprobs).sum(dim=1) + 1).cpu().numpy()
        if num_top:
            ids = _largest_of_rows(scores, num_top)
            found.top_ids[some] = ids.cpu().numpy()
            found.top_logprobs[some] = scores.gather(1, ids).cpu().numpy()
    return found


def _largest_of_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [rows, count] of the largest scores of each row, descending, ties by id."""
    values, ids = scores.topk(min(count + 1, scores.shape[1]), dim=1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero()[:, 0].tolist()
    ids = ids[:, :count].clone()
    for row in tied:
        ids[row] = ids.new_tensor(largest(scores[row], count))
    return ids
