"""From logits to token ids: greedy, temperature, top-k and top-p, in that order, as `transformers` applies them.

A sampled request draws its n-th number from (seed, n) alone: the same request gives the same tokens whatever stands
beside it in the batch, and after a preemption that computes it again. Ties go to the lowest id everywhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rekindle.errors import BadRequest, RequestFailed

MAX_STOPS = 8
SEED_LIMIT = 1 << 63
NUCLEUS_GUESSES = (64, 1024)  # sorting a vocabulary of 150,000 costs 14 ms, finding its 1,024 largest 1 ms


def _need(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise BadRequest(f"{param} {message}", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens. `max_tokens` None: the rest of the context; `top_k` 0: no limit."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        limit = self.max_tokens
        _need(limit is None or (_is_int(limit) and limit >= 1), "max_tokens", "must be an integer ≥ 1")
        _need(_is_number(self.temperature) and self.temperature >= 0, "temperature", "must be a number ≥ 0")
        _need(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "must lie in (0, 1]")
        _need(_is_int(self.top_k) and self.top_k >= 0, "top_k", "must be an integer ≥ 0 (0: no limit)")
        seed_fits = self.seed is None or (_is_int(self.seed) and -SEED_LIMIT <= self.seed < SEED_LIMIT)
        _need(seed_fits, "seed", "must be a 64-bit integer")
        stop: object = self.stop
        texts = isinstance(stop, tuple) and all(isinstance(text, str) and text for text in stop)
        _need(texts and len(self.stop) <= MAX_STOPS, "stop", f"must be at most {MAX_STOPS} non-empty strings")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1


@dataclass(slots=True)
class SamplerState:
    """One request's place in its stream of random numbers."""

    params: SamplingParams
    seed: int
    num_drawn: int = 0

    @classmethod
    def create(cls, params: SamplingParams, entropy: Callable[[], int]) -> SamplerState:
        """The state before the first token; `entropy` gives the seed where the request brings none."""
        return cls(params, entropy() if params.seed is None else params.seed)

    def draw(self) -> float:
        """The next uniform number in [0, 1): a hash of seed and count, so it can be drawn again."""
        text = b"%d %d" % (self.seed, self.num_drawn)
        self.num_drawn += 1
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def check(self) -> None:
        """A state never counts below zero."""
        assert self.num_drawn >= 0, f"{self.num_drawn} numbers drawn"


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int]:
    """The next token id for each row of `logits` [rows, vocab]; greedy rows cost one argmax together."""
    assert logits.shape[0] == len(states), f"{logits.shape[0]} rows for {len(states)} requests"
    if not states:
        return []
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for row, state in enumerate(states):
        if not state.params.is_greedy:
            chosen[row] = _sample_row(logits[row], state)
    return chosen


def _sample_row(logits: torch.Tensor, state: SamplerState) -> int:
    """Draw from one row [vocab] by inverting the cumulative distribution, candidates in order of probability."""
    params = state.params
    scores = logits.to(device="cpu", dtype=torch.float64)
    if not math.isfinite(float(scores.max())):
        raise RequestFailed("the model's logits are not finite: no token can be drawn")
    scores = (scores - scores.max()) / params.temperature  # the most likely at 0: no temperature is too low
    ids = torch.arange(len(scores))
    if 0 < params.top_k < len(scores):
        ids = (scores >= scores.topk(params.top_k).values[-1]).nonzero()[:, 0]
        ids = ids[scores[ids].sort(descending=True, stable=True).indices[: params.top_k]]
    weights = torch.softmax(scores[ids], dim=0)
    if params.top_p < 1:
        order = _most_likely(weights, params.top_p)
        inside = weights[order].cumsum(0) - weights[order] < params.top_p
        ids, weights = ids[order[inside]], weights[order[inside]]
    total = weights.cumsum(0)
    drawn = state.draw()
    at = int(torch.searchsorted(total, drawn * float(total[-1]), right=True))
    return int(ids[min(at, len(ids) - 1)])


def _most_likely(weights: torch.Tensor, mass: float) -> torch.Tensor:
    """Places of the largest weights, descending, ties by place: all, or enough to hold `mass`."""
    for count in NUCLEUS_GUESSES:
        kept = (weights >= weights.topk(min(count, len(weights))).values[-1]).nonzero()[:, 0]
        if float(weights[kept].sum()) > mass:
            break
    else:
        # Those below (1 - mass)/n weigh less than 1 - mass together, so none of them is needed.
        kept = (weights >= (1 - mass) / len(weights)).nonzero()[:, 0]
    return kept[weights[kept].sort(descending=True, stable=True).indices]
