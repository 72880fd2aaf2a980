"""How likely the model found a token, and what it found likelier: log probabilities of its raw distribution.

Raw: before temperature, penalties and bias. Computed only for the rows that ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural log probability; `top` are the likeliest ones at its place, most likely first.

    `text` is what the token spells: bytes, for a token may be half a character.
    """

    token_id: int
    logprob: float
    text: bytes
    top: tuple[TokenLogprob, ...] = ()


def score(logits: torch.Tensor, token: int, num_top: int, *, spell: Callable[[int], bytes]) -> TokenLogprob:
    """The log probability of `token` under one row of `logits` [vocab], and the `num_top` likeliest; fp32.

    Ties go to the lowest id. Costs one pass over the vocabulary.
    """
    scores = logits.float().log_softmax(dim=0)
    top = tuple(TokenLogprob(at, float(scores[at]), spell(at)) for at in _largest(scores, num_top))
    return TokenLogprob(token, float(scores[token]), spell(token), top)


def _largest(scores: torch.Tensor, count: int) -> list[int]:
    """Ids of the largest scores, descending, ties by id."""
    if not count:
        return []
    least = scores.topk(min(count, len(scores))).values[-1]
    kept = (scores >= least).nonzero()[:, 0]
    order: list[int] = kept[scores[kept].sort(descending=True, stable=True).indices].tolist()
    return order[:count]
