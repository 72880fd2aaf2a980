"""One token with its log probability and the likeliest ones at its position, in the model's raw distribution.

Raw: before temperature, penalties and bias. Computed in `row_scores`, only for the rows that request them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
