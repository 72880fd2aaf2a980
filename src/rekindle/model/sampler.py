"""From logits to token ids: greedy, temperature, top-k, top-p and min-p, in that order, as `transformers` applies them.

What changes the scores before (bias, penalties) is in `adjustments`. A sampled request draws its n-th token from
(seed, n) alone: the same request gives the same tokens regardless of the rest of the batch, and after a preemption
that recomputes it. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rekindle.errors import RequestFailed
from rekindle.model.adjustments import NO_HISTORY, History, adjusted, adjusts
from rekindle.model.params import SamplingParams

NOT_FINITE = "the model's logits are not finite: no token can be drawn"
NUCLEUS_GUESSES = (64, 1024)  # sorting a vocabulary of 150,000 costs 14 ms, finding its 1,024 largest 1 ms


@dataclass(frozen=True, slots=True)
class SamplerState:
    """How one request draws: its parameters, its stream of random numbers, and the ids that end its reply."""

    params: SamplingParams
    seed: int
    ends: frozenset[int] = frozenset()

    @classmethod
    def create(
        cls, params: SamplingParams, entropy: Callable[[], int], *, eos_ids: frozenset[int] = frozenset()
    ) -> SamplerState:
        """Create the state of a request; `entropy` gives the seed if it has none, `eos_ids` are the model's."""
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        return cls(params, entropy() if params.seed is None else params.seed, ends)

    @property
    def needs_history(self) -> bool:
        """Whether its tokens depend on the ids of earlier tokens, not only on their number."""
        return adjusts(self.params)

    def draw(self, index: int) -> float:
        """The uniform number in [0, 1) for token `index` of the reply: a hash, so it can be drawn again."""
        text = b"%d %d" % (self.seed, index)
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def masked(logits: torch.Tensor, masks: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The logits [rows, vocab] with -inf for tokens that the mask of a row, bool [up to vocab], does not allow."""
    if not masks:
        return logits
    logits = logits.clone()
    for row, mask in masks.items():
        size = min(len(mask), logits.shape[1])
        logits[row, :size].masked_fill_(~mask[:size].to(logits.device), -math.inf)
        logits[row, size:] = -math.inf
    return logits


def sample(
    logits: torch.Tensor, states: Sequence[SamplerState], histories: Sequence[History] | None = None
) -> list[int]:
    """The next token id for each row of `logits` [rows, vocab]; None: every row is at the start of its reply.

    Greedy rows without adjustments cost one argmax together. Raises RequestFailed for logits that are not finite.
    """
    assert logits.shape[0] == len(states), f"{logits.shape[0]} rows for {len(states)} requests"
    histories = histories if histories is not None else [NO_HISTORY] * len(states)
    assert len(histories) == len(states), f"{len(histories)} histories for {len(states)} requests"
    if not states:
        return []
    best = logits.argmax(dim=-1)
    if not logits.gather(1, best[:, None]).isfinite().all():  # argmax takes NaN as the largest
        raise RequestFailed(NOT_FINITE)
    chosen: list[int] = best.tolist()
    for row, (state, history) in enumerate(zip(states, histories, strict=True)):
        if state.needs_history or not state.params.is_greedy:
            chosen[row] = _sample_row(logits[row], state, history)
    return chosen


def _sample_row(logits: torch.Tensor, state: SamplerState, history: History) -> int:
    """Draw from one row [vocab] by inverting the cumulative distribution, candidates in order of probability."""
    params = state.params
    scores = logits.to(device="cpu", dtype=torch.float64)
    if state.needs_history:
        scores = adjusted(scores, params, history, state.ends)
    if not math.isfinite(float(scores.max())):
        raise RequestFailed(NOT_FINITE)
    if params.is_greedy:
        return int(scores.argmax())
    scores = (scores - scores.max()) / params.temperature  # the largest becomes 0, so no temperature is too low
    ids = _within_top_k(scores, params.top_k)
    weights = torch.softmax(scores[ids], dim=0)
    if params.top_p < 1:
        order = _most_likely(weights, params.top_p)
        inside = weights[order].cumsum(0) - weights[order] < params.top_p
        ids, weights = ids[order[inside]], weights[order[inside]]
    if params.min_p > 0:
        likely = weights >= params.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    total = weights.cumsum(0)
    drawn = state.draw(len(history.reply))
    at = int(torch.searchsorted(total, drawn * float(total[-1]), right=True))
    return int(ids[min(at, len(ids) - 1)])


def _within_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids of the `top_k` largest scores, ties by id, descending; all of them by id if there is no limit."""
    if not 0 < top_k < len(scores):
        return torch.arange(len(scores))
    ids = (scores >= scores.topk(top_k).values[-1]).nonzero()[:, 0]
    return ids[scores[ids].sort(descending=True, stable=True).indices[:top_k]]


def _most_likely(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Indices of the largest weights, descending, ties by index: all, or enough to hold `mass`."""
    for count in NUCLEUS_GUESSES:
        kept = (weights >= weights.topk(min(count, len(weights))).values[-1]).nonzero()[:, 0]
        if float(weights[kept].sum()) > mass:
            break
    else:
        # Those below (1 - mass)/n weigh less than 1 - mass together, so none of them is needed.
        kept = (weights >= (1 - mass) / len(weights)).nonzero()[:, 0]
    return kept[weights[kept].sort(descending=True, stable=True).indices]
