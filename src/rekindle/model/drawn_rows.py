"""Some rows of a step's logits, and a token drawn from each, on the device that has them.

    plain           the largest of the logits
    greedy          the largest of the adjusted scores
    rank            with top-k or top-p: one of the likeliest `CANDIDATES`; whether these were enough is said
    id              with neither: one of all

What a device needs to know of the draws goes there in one copy, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.model.adjustments import Change, adjust, changes, joined
from rekindle.model.choice import Cuts, by_id, by_rank
from rekindle.model.row_scores import raw_scores
from rekindle.model.sampler import Draw
from rekindle.model.transfer import to_device

# Sorting a vocabulary of 150,000 takes a CPU 12 ms, finding its 64, 1,024 or 16,384 largest 0.3, 0.7 and 2 ms.
CANDIDATES = {"cpu": (64, 1024, 1 << 14)}
CANDIDATES_ELSEWHERE = (1024,)
DOUBLES = ("cpu",)  # devices that draw in fp64: cards for people do it at 1/64 of the rate of fp32, some not at all


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """What was launched for some draws. `num_candidates`: of draws by rank; 0 if there is none.

    `tensors` are the tokens int64 [draws], bool [draws] whether the scores are finite and whether the candidates were
    enough, and the `raw_scores` of those draws that ask for them, in their order.
    """

    tensors: tuple[Tensor, ...]
    num_candidates: int = 0


def plain_rows(logits: Tensor, rows: Sequence[int]) -> DrawnRows:
    """The likeliest tokens of some rows."""
    if list(rows) != list(range(len(logits))):
        (at,) = to_device([np.array(rows, dtype=np.int64)], logits.device)
        logits = logits.index_select(0, at)
    tokens = logits.argmax(dim=1)
    largest = logits.gather(1, tokens[:, None])[:, 0]
    return DrawnRows((tokens, largest.isfinite(), torch.ones_like(largest, dtype=torch.bool)))


def drawn_rows(logits: Tensor, draws: Sequence[Draw], *, least: int) -> DrawnRows:
    """Draw from copies of some rows, in the order of their kinds; by rank from at least `least` candidates.

    Raises RequestFailed for ids outside of the vocabulary.
    """
    vocab, sent = logits.shape[1], _Sent.of(logits, draws)
    scores = sent.adjusted(logits)
    peaks = scores.amax(dim=1, keepdim=True)
    sure = torch.ones(len(draws), dtype=torch.bool, device=logits.device)
    kinds = [draw.kind(vocab) for draw in draws]
    first, end = (sum(kind in those for kind in kinds) for those in (("greedy",), ("greedy", "rank")))
    tokens, count = [scores[:first].argmax(dim=1)], 0
    if end > first:
        limits, some = [draw.limit(vocab) for draw in draws[first:end]], slice(first, end)
        count = _num_candidates(logits, limits, least)
        cuts = sent.cuts.part(0, len(limits))
        found, sure[some] = by_rank(scores[some], peaks[some], cuts, count=count, is_limited=all(limits))
        tokens.append(found)
    if len(draws) > end:
        tokens.append(by_id(scores[end:], peaks[end:], sent.cuts.part(end - first, len(draws) - first)))
    drawn = torch.cat(tokens)
    return DrawnRows((drawn, peaks[:, 0].isfinite(), sure, *sent.raw_scores(logits, drawn)), count)


def _num_candidates(logits: Tensor, limits: Sequence[int], least: int) -> int:
    """How many of the likeliest ids to order: more than `limits`, which are of top-k, and no fewer than `least`."""
    vocab, choices = logits.shape[1], CANDIDATES.get(logits.device.type, CANDIDATES_ELSEWHERE)
    wanted = max(least, *(limit + 1 for limit in limits))
    return next((count for count in choices if wanted <= count <= vocab // 4), vocab)  # else all cost little more


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What a device knows of some draws: their rows, which of them ask for scores and which have a mask, int64, what
    masks bar, bool [masked, vocab], how scores change, and how those that are not greedy draw."""

    rows: Tensor
    asking: Tensor
    masked: Tensor
    barred: Tensor
    changes: Sequence[Tensor]
    cuts: Cuts
    num_top: int

    @classmethod
    def of(cls, logits: Tensor, draws: Sequence[Draw]) -> _Sent:
        vocab = logits.shape[1]
        asking = {at: top for at, draw in enumerate(draws) if (top := draw.state.params.logprobs) is not None}
        masks = {at: draw.mask for at, draw in enumerate(draws) if draw.mask is not None}
        barred = np.ones((len(masks), vocab), dtype=np.bool_)
        for row, mask in zip(barred, masks.values(), strict=True):
            np.logical_not(mask[:vocab], out=row[: len(mask)])
        changed = joined([_changes(draw, vocab) for draw in draws], vocab)
        arrays = [
            *(np.array(list(each), dtype=np.int64) for each in ((draw.row for draw in draws), asking, masks)),
            barred,
            *(array for change in changed for array in (change.at, change.numbers)),
            *Cuts.arrays([draw for draw in draws if draw.kind(vocab) != "greedy"], vocab),
        ]
        rows, wanted, masked, those, *others = to_device(arrays, logits.device)
        num = 2 * len(changed)
        return cls(rows, wanted, masked, those, others[:num], Cuts(*others[num:]), max(asking.values(), default=0))

    def adjusted(self, logits: Tensor) -> Tensor:
        """A copy of the rows, masked and adjusted."""
        is_double = logits.device.type in DOUBLES or logits.dtype == torch.float64
        scores = logits.index_select(0, self.rows).to(torch.float64 if is_double else torch.float32)
        if len(self.masked) == len(scores):
            scores.masked_fill_(self.barred, -torch.inf)
        elif len(self.masked):
            some = scores.index_select(0, self.masked).masked_fill_(self.barred, -torch.inf)
            scores.index_copy_(0, self.masked, some)
        adjust(scores, self.changes)
        return scores

    def raw_scores(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The scores of the tokens whose draws ask for them; nothing if none does."""
        if not len(self.asking):
            return ()
        own = logits.index_select(0, self.rows.index_select(0, self.asking))
        return raw_scores(own, tokens.index_select(0, self.asking), self.num_top)


def _changes(draw: Draw, vocab: int) -> tuple[Change, ...]:
    return changes(draw.state.params, draw.history, draw.state.ends, vocab)
