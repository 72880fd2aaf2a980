"""How one request draws its tokens: its parameters, its random numbers, what is known before each draw.

A sampled request draws its n-th token from (seed, n) alone: the same request gives the same tokens regardless of the
rest of the batch, and after a preemption that recomputes it. What is computed from this stands in `drawing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rekindle.model.adjustments import NO_HISTORY, History, adjusts
from rekindle.model.params import SamplingParams

NOTHING_TO_DRAW = "the model's logits are not finite: no token can be drawn"


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


Kind = Literal["plain", "greedy", "rank", "id"]
KINDS = get_args(Kind)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token to draw: from which row of a step's logits, how, and after which tokens.

    `mask`: which tokens are allowed, bool [up to vocab], none after its end; None: all are.
    """

    row: int
    state: SamplerState
    history: History = NO_HISTORY
    mask: np.ndarray | None = None

    def limit(self, vocab: int) -> int:
        """From how many of the likeliest tokens it draws; 0: from all."""
        top_k = self.state.params.top_k
        return top_k if top_k < vocab else 0

    def kind(self, vocab: int) -> Kind:
        """How its token is found."""
        params = self.state.params
        if params.is_greedy:
            is_changed = self.mask is not None or self.state.needs_history
            return "greedy" if is_changed or params.logprobs is not None else "plain"
        return "rank" if self.limit(vocab) or params.top_p < 1 else "id"
