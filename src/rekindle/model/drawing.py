"""From logits to token ids, all rows of a step at once, on the device that has them.

Greedy, temperature, top-k, top-p and min-p, in that order, as `transformers` applies them; what changes the scores
before (masks, then bias and penalties) is in `adjustments`, draws by shares in `choice`. Ties go to the lowest id
everywhere.

Nothing waits for the device before results are asked for, and all of them come in one copy. Rows whose candidates were
too few draw again then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from rekindle.model.drawn_rows import drawn_rows, plain_rows
from rekindle.model.row_scores import RowScores
from rekindle.model.sampler import KINDS, Draw, Kind
from rekindle.model.transfer import Readback, to_device

# Numbers that are copied at once. On a CPU they stay in its cache; elsewhere this bounds memory, and one copy is usual.
MOST_SCORES = {"cpu": 1 << 18}
MOST_SCORES_ELSEWHERE = 1 << 25


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and where its request asks for log probabilities those of its row."""

    token: int
    scores: RowScores | None = None


class Drawing:
    """The tokens of some draws from `logits` [rows, vocab], which stay as they are; launched when it is made.

    What comes back begins to do so at once, and takes other tensors `along`. `least`: from how many candidates rows
    draw by rank, at least. Raises RequestFailed for a draw with ids outside of the vocabulary.
    """

    def __init__(self, logits: Tensor, draws: Sequence[Draw], *, along: Sequence[Tensor] = (), least: int = 1) -> None:
        self._logits, self._draws = logits, draws
        vocab = logits.shape[1]
        most = max(1, MOST_SCORES.get(logits.device.type, MOST_SCORES_ELSEWHERE) // vocab)
        by_kind: dict[Kind, list[int]] = {kind: [] for kind in KINDS}
        for at, draw in enumerate(draws):
            by_kind[draw.kind(vocab)].append(at)
        plain, others = by_kind["plain"], [*by_kind["greedy"], *by_kind["rank"], *by_kind["id"]]
        copied = [others[first : first + most] for first in range(0, len(others), most)]
        self._parts = [drawn_rows(logits, [draws[at] for at in places], least=least) for places in copied]
        self._places = [*copied, plain] if plain else copied
        if plain:
            self._parts.append(plain_rows(logits, [draws[at].row for at in plain]))
        self._num_along = len(along)
        self._back = Readback([*along, *(tensor for part in self._parts for tensor in part.tensors)])
        self._results: list[Drawn | None] | None = None
        self._is_redrawn = False

    def along(self) -> list[np.ndarray]:
        """The tensors that were taken along; waits for the device."""
        return self._back.arrays()[: self._num_along]

    def tokens(self, places: Sequence[int]) -> Tensor:
        """Tokens int64 [places] of some draws on the device, as they are before any `is_redrawn`; waits for nothing."""
        order = {at: row for row, at in enumerate(at for part in self._places for at in part)}
        drawn = torch.cat([part.tensors[0] for part in self._parts])
        rows = np.array([order[at] for at in places], dtype=np.int64)
        return drawn.index_select(0, to_device([rows], drawn.device)[0])

    @property
    def is_redrawn(self) -> bool:
        """Whether a token was drawn again, once the results are known."""
        return self._is_redrawn

    def results(self) -> list[Drawn | None]:
        """What was drawn, for each draw; None where scores are not finite, or no token is allowed.

        Waits for the device, and again if candidates were too few.
        """
        if self._results is None:
            self._results = self._read()
        return self._results

    def _read(self) -> list[Drawn | None]:
        arrays = iter(self._back.arrays()[self._num_along :])
        found: list[Drawn | None] = [None] * len(self._draws)
        unsure: list[int] = []
        for places, part in zip(self._places, self._parts, strict=True):
            tokens, are_finite, are_sure, *scores = islice(arrays, len(part.tensors))
            asking = [at for at in places if self._draws[at].state.params.logprobs is not None]
            scored = {at: RowScores(*scores).copy(row, row + 1) for row, at in enumerate(asking)}
            for at, token, is_finite, is_sure in zip(places, tokens.tolist(), are_finite, are_sure, strict=True):
                if is_finite:
                    found[at] = Drawn(token, scored.get(at))
                    unsure += [] if is_sure else [at]
        self._is_redrawn = bool(unsure)
        if unsure:
            more = 1 + max(part.num_candidates for part in self._parts)
            again = Drawing(self._logits, [self._draws[at] for at in unsure], least=more)
            for at, drawn in zip(unsure, again.results(), strict=True):
                found[at] = drawn
        return found
