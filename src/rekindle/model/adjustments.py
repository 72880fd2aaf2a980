"""Adjust scores before a token is chosen: bias, penalties, and end tokens that are not allowed yet.

In the order of vLLM's sampler (transformers agrees where it has them), each applied to the result of the previous:

    logit_bias           score + bias
    repetition_penalty   ids of prompt and reply: score / penalty where positive, score * penalty where negative
                         (Keskar et al. 2019, CTRL, §4.1; transformers' RepetitionPenaltyLogitsProcessor)
    frequency_penalty    score - penalty * count of the id in the reply    (OpenAI)
    presence_penalty     score - penalty if the id is in the reply         (OpenAI)
    min_tokens           ids that would end the reply: -inf while it is shorter

vLLM masks the ends before the penalties, which is equivalent: nothing changes a score of -inf. Everything is derived
from the ids, so no count can drift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rekindle.model.params import SamplingParams


@dataclass(frozen=True, slots=True)
class History:
    """The ids before the token to choose (uint32), those of the prompt and those of the reply."""

    prompt: np.ndarray
    reply: np.ndarray


NO_HISTORY = History(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.uint32))


def adjusts(params: SamplingParams) -> bool:
    """Whether the scores are ever adjusted; rows without adjustments need no history and no copy."""
    penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalised or bool(params.logit_bias) or params.min_tokens > 0


def adjusted(scores: torch.Tensor, params: SamplingParams, history: History, ends: frozenset[int]) -> torch.Tensor:
    """Return an adjusted copy of one row of float64 scores [vocab]; `ends` are the ids that would end the reply.

    Apart from the copy, the cost is linear in the history, not in the vocabulary.
    """
    scores = scores.clone()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.repetition_penalty != 1:
        _penalise_repetition(scores, params.repetition_penalty, np.concatenate([history.prompt, history.reply]))
    if (params.frequency_penalty or params.presence_penalty) and len(history.reply):
        ids, counts = np.unique(history.reply, return_counts=True)
        penalty = params.frequency_penalty * torch.from_numpy(counts).to(torch.float64) + params.presence_penalty
        scores[torch.from_numpy(ids.astype(np.int64))] -= penalty
    if len(history.reply) < params.min_tokens:
        scores[[token for token in ends if token < len(scores)]] = -torch.inf
    return scores


def _penalise_repetition(scores: torch.Tensor, penalty: float, ids: np.ndarray) -> None:
    at = torch.from_numpy(ids.astype(np.int64))
    seen = scores[at]
    scores[at] = torch.where(seen < 0, seen * penalty, seen / penalty)  # an id twice writes the same value twice
