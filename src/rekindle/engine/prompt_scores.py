"""The scores of one prompt's tokens, as far as they are known, in order; the first token has none.

Mutable, owned by the engine thread once submitted. Sequences of one prompt share it: the first to compute the prompt
fills it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rekindle.model.logprobs import TokenLogprob
from rekindle.model.row_scores import RowScores


class PromptScores:
    """Scores of tokens [0, `num_known`) of a prompt `ids` u32 [n], with `num_top` likeliest tokens at each place."""

    def __init__(self, ids: np.ndarray, num_top: int) -> None:
        self.num_known = 1
        self._ids = ids
        self._rows = RowScores.empty(len(ids), num_top)

    @property
    def num_top(self) -> int:
        """Likeliest tokens of each place."""
        return self._rows.num_top

    @property
    def is_complete(self) -> bool:
        """Whether every token's score is known."""
        return self.num_known == len(self._ids)

    @property
    def num_skippable(self) -> int:
        """Leading tokens that need not be computed for a score; the last one before an unknown score must."""
        return len(self._ids) if self.is_complete else self.num_known - 1

    def ids_from(self, first: int, count: int) -> np.ndarray:
        """Return the ids of tokens [first, first + count)."""
        return self._ids[first : first + count]

    def put(self, first: int, rows: RowScores) -> None:
        """Add the scores of tokens from `first` on, which leave no gap; those that are known stay as they are."""
        assert first <= self.num_known, f"scores from {first} leave a gap after {self.num_known}"
        end = first + len(rows.logprobs)
        if end > self.num_known:
            self._rows.put(self.num_known, rows.copy(self.num_known - first, end - first))
            self.num_known = end

    def rows_from(self, first: int, count: int) -> RowScores:
        """Return a copy of the scores of tokens [first, first + count), which must be known."""
        assert first + count <= self.num_known, f"{first + count} scores wanted, {self.num_known} known"
        return self._rows.copy(first, first + count)

    def tokens(self, bytes_of: Callable[[int], bytes]) -> tuple[TokenLogprob | None, ...]:
        """Return all scores, one for each token; None for the first. They must be complete."""
        assert self.is_complete, f"{self.num_known} of {len(self._ids)} scores are known"
        tokens = enumerate(self._ids[1:].tolist(), 1)
        return (None, *(self._rows.token(at, token, bytes_of) for at, token in tokens))
