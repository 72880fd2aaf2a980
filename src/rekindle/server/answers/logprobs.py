"""Log probabilities of generated tokens as JSON, the same in every dialect that has them."""

from __future__ import annotations

from typing import Any

from rekindle.model.logprobs import TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


def finite(token: TokenLogprob) -> float:
    """Return the log probability, at least `MIN_LOGPROB`."""
    return max(token.logprob, MIN_LOGPROB)


def token_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return one token; `bytes` distinguish tokens that are not valid text alone."""
    return {"token": token.text.decode("utf-8", "replace"), "logprob": finite(token), "bytes": list(token.text)}


def position_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return the token at a position with the likeliest ones there."""
    return {**token_entry(token), "top_logprobs": [token_entry(each) for each in token.top]}
