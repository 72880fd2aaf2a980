"""Draw one id from each row of scores: by rank among the likeliest, or by id among all.

Tensors in, tensors out, of sizes that follow from the arguments: nothing waits for the device. Shares are whole
numbers, `WHOLE` for the likeliest id of a row. Their sums are exact in any order, so a row's id depends neither on its
company nor on how a device adds. What has less than 1/`WHOLE` of the likeliest one's share is never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.model.sampler import Draw

WHOLE = 1 << 42  # 2^21 ids of equal share have a sum below 2^63


@dataclass(frozen=True, slots=True)
class Cuts:
    """How some rows draw, [rows, 1] each: int64 `top_k`, fp64 the others; `drawn` are uniform numbers in [0, 1)."""

    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    drawn: Tensor

    @staticmethod
    def arrays(draws: Sequence[Draw], vocab: int) -> list[np.ndarray]:
        """The fields on the host; `top_k` is `vocab` where it limits nothing."""
        params = [draw.state.params for draw in draws]
        top_k = [draw.limit(vocab) or vocab for draw in draws]
        drawn = [draw.state.draw(len(draw.history.reply)) for draw in draws]
        others = np.array([(each.temperature, each.top_p, each.min_p) for each in params], dtype=np.float64)
        columns = np.column_stack((others.reshape(-1, 3), drawn)).T.copy()
        return [np.array(top_k, dtype=np.int64)[:, None], *columns[:, :, None]]

    def part(self, first: int, end: int) -> Cuts:
        """Those of rows [first, end)."""
        fields = self.top_k, self.temperature, self.top_p, self.min_p, self.drawn
        return Cuts(*(each[first:end] for each in fields))


def by_id(scores: Tensor, peaks: Tensor, cuts: Cuts) -> Tensor:
    """Ids [rows] by `min_p` alone, from all of `scores` [rows, vocab], which it overwrites; `peaks` [rows, 1]."""
    shares = _shares(scores, peaks, cuts)
    shares = shares.masked_fill_(shares < cuts.min_p * WHOLE, 0)
    sums = shares.cumsum_(dim=1)
    at = torch.searchsorted(sums, _point(sums[:, -1:], cuts), right=True)
    return at[:, 0].clamp_(max=scores.shape[1] - 1)


def by_rank(scores: Tensor, peaks: Tensor, cuts: Cuts, *, count: int, is_limited: bool) -> tuple[Tensor, Tensor]:
    """Ids [rows] by all limits, from the `count` likeliest of each row, and bool [rows]: whether these were enough.

    Overwrites `scores` [rows, vocab]; `peaks` [rows, 1] are their largest. `is_limited`: every row has a `top_k`, so
    shares of all ids are not needed. Ties at the last of the likeliest may be others than the lowest ids: a row that
    reaches them is not sure.
    """
    values, ids = _likeliest(scores, count)
    shares = _shares(values.clone(), peaks, cuts)
    in_top_k = torch.arange(count, device=scores.device) < cuts.top_k
    kept = torch.where(in_top_k, shares, 0)
    sums = kept.cumsum(dim=1)
    whole = sums[:, -1:]
    if not is_limited:
        every = _shares(scores, peaks, cuts).sum(dim=1, keepdim=True)
        whole = torch.where(cuts.top_k < scores.shape[1], whole, every)
    inside = in_top_k & (sums - kept < cuts.top_p * whole) & (shares >= cuts.min_p * WHOLE)
    sums = torch.where(inside, kept, 0).cumsum(dim=1)
    at = (sums <= _point(sums[:, -1:], cuts)).sum(dim=1, keepdim=True).clamp_(max=count - 1)
    last = inside.sum(dim=1, keepdim=True).clamp_(min=1) - 1  # limits keep the first ones of a row
    is_sure = (values.gather(1, last) > values[:, -1:]) | (shares[:, -1:] == 0)
    return ids.gather(1, at)[:, 0], is_sure[:, 0] | (count == scores.shape[1])


def _likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their ids, descending, ties by id."""
    if count == scores.shape[1]:
        return scores.sort(dim=1, descending=True, stable=True)
    values, ids = scores.topk(count, dim=1)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _shares(scores: Tensor, peaks: Tensor, cuts: Cuts) -> Tensor:
    """Shares int64 of scores, which it overwrites."""
    limits = torch.finfo(scores.dtype)
    temperature = cuts.temperature.clamp(limits.tiny, limits.max).to(scores.dtype)  # no temperature is too low
    return scores.sub_(peaks).div_(temperature).exp_().mul_(WHOLE).to(torch.int64)


def _point(wholes: Tensor, cuts: Cuts) -> Tensor:
    """The point in each sum [rows, 1] at which the drawn id has its share."""
    return (cuts.drawn * wholes).to(torch.int64)
