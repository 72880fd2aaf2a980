"""Sampling by the definition, one row after the other in fp64 on the host: what `Drawing` must give."""

from __future__ import annotations

import math

import numpy as np
import torch

from rekindle.model.adjustments import NO_HISTORY, History
from rekindle.model.drawing import Drawing
from rekindle.model.params import SamplingParams
from rekindle.model.sampler import Draw, SamplerState


def sample(
    logits: torch.Tensor, states: list[SamplerState], histories: list[History] | None = None
) -> list[int | None]:
    """The next token for each row of logits [rows, vocab]; None where none can be drawn."""
    pasts = histories or [NO_HISTORY] * len(states)
    draws = [Draw(row, state, past) for row, (state, past) in enumerate(zip(states, pasts, strict=True))]
    return [None if drawn is None else drawn.token for drawn in Drawing(logits, draws).results()]


def row_tokens(logits: torch.Tensor, draw: Draw, *, within: float) -> set[int | None]:
    """The tokens of one draw, whose uniform number and top-p are known `within` this."""
    moves = [0.0, within, -within]
    return {row_token(logits, draw, shift=shift, slack=slack) for shift in moves for slack in moves}


def row_token(logits: torch.Tensor, draw: Draw, *, shift: float = 0.0, slack: float = 0.0) -> int | None:
    """The token of one draw; None: no token can be drawn. `shift` is added to its uniform number, `slack` to top-p."""
    params = draw.state.params
    scores = by_the_formulas(masked(logits[draw.row], draw.mask).double(), params, draw.history, draw.state.ends)
    if not math.isfinite(float(scores.max())):
        return None
    if params.is_greedy:
        return int(scores.argmax())
    scores = (scores - scores.max()) / params.temperature
    ids = torch.arange(len(scores))
    top_k = params.top_k if params.top_k < len(scores) else 0
    if top_k or params.top_p < 1:
        ids = scores.sort(descending=True, stable=True).indices[: top_k or len(scores)]
    weights = torch.softmax(scores[ids], dim=0)
    if params.top_p < 1:
        inside = weights.cumsum(0) - weights < params.top_p + slack
        ids, weights = ids[inside], weights[inside]
    if params.min_p > 0:
        likely = weights >= params.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    total = weights.cumsum(0)
    drawn = min(max(0.0, draw.state.draw(len(draw.history.reply)) + shift), 1 - 2**-53)
    at = int(torch.searchsorted(total, drawn * float(total[-1]), right=True))
    return int(ids[min(at, len(ids) - 1)])


def masked(row: torch.Tensor, mask: np.ndarray | None) -> torch.Tensor:
    """One row of logits with -inf for tokens that are not allowed."""
    if mask is None:
        return row
    allowed = torch.zeros(len(row), dtype=torch.bool)
    allowed[: len(mask)] = torch.from_numpy(mask[: len(row)])
    return row.masked_fill(~allowed, -math.inf)


def by_the_formulas(
    scores: torch.Tensor, params: SamplingParams, history: History, ends: frozenset[int]
) -> torch.Tensor:
    """An adjusted copy of one row of scores: one after the other, counting with lists."""
    bias, result = dict(params.logit_bias), []
    prompt, reply = history.prompt.tolist(), history.reply.tolist()
    for token, score in enumerate(scores.tolist()):
        score += bias.get(token, 0.0)
        if token in prompt + reply:
            score = score / params.repetition_penalty if score >= 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * reply.count(token) + params.presence_penalty * (token in reply)
        result.append(-math.inf if token in ends and len(reply) < params.min_tokens else score)
    return torch.tensor(result, dtype=torch.float64)
