"""Log probabilities of tokens and of the likeliest ones at their positions, in the model's raw distribution.

Raw: before temperature, penalties and bias. Computed only for the rows that request them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural log probability; `top` are the likeliest ones at its position, most likely first.

    `text` is bytes, because a token may be half a character. `rank`: 1 for the likeliest token of the vocabulary; 0:
    not counted.
    """

    token_id: int
    logprob: float
    text: bytes
    top: tuple[TokenLogprob, ...] = ()
    rank: int = 0


def score(logits: torch.Tensor, token: int, num_top: int, *, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """The log probability of `token` under one row of `logits` [vocab], and the `num_top` likeliest; fp32.

    Ties go to the lowest id. Costs one pass over the vocabulary.
    """
    scores = logits.float().log_softmax(dim=0)
    top = tuple(TokenLogprob(at, float(scores[at]), bytes_of(at)) for at in largest(scores, num_top))
    return TokenLogprob(token, float(scores[token]), bytes_of(token), top)


def largest(scores: torch.Tensor, count: int) -> list[int]:
    """Ids of the `count` largest `scores` [vocab], descending, ties by id."""
    if not count:
        return []
    least = scores.topk(min(count, len(scores))).values[-1]
    kept = (scores >= least).nonzero()[:, 0]
    order: list[int] = kept[scores[kept].sort(descending=True, stable=True).indices].tolist()
    return order[:count]
