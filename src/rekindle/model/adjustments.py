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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, where

from rekindle.errors import RequestFailed
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


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Places in rows of scores, int64 [n], and a number for each, fp64 [n]."""

    at: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray | Sequence[int], numbers: np.ndarray | Sequence[float] | float) -> Change:
        at = np.asarray(ids, dtype=np.int64)
        return cls(at, np.broadcast_to(np.asarray(numbers, dtype=np.float64), at.shape))


def changes(params: SamplingParams, history: History, ends: frozenset[int], vocab: int) -> tuple[Change, ...]:
    """What happens to one row of scores [vocab], in the order of `APPLIED`, or nothing; `ends` would end the reply.

    The cost is linear in the history, not in the vocabulary. Raises RequestFailed for ids outside of the vocabulary.
    """
    if not adjusts(params):
        return ()
    bias, is_short = dict(params.logit_bias), len(history.reply) < params.min_tokens
    is_repeating, is_counting = params.repetition_penalty != 1, params.frequency_penalty or params.presence_penalty
    seen = np.concatenate([history.prompt, history.reply]) if is_repeating else ()
    ids, counts = np.unique(history.reply if is_counting else history.reply[:0], return_counts=True)
    costs = params.frequency_penalty * counts.astype(np.float64) + params.presence_penalty
    found = (
        Change.of(list(bias), list(bias.values())),
        Change.of(seen, params.repetition_penalty),
        Change.of(ids, -costs),
        Change.of([end for end in sorted(ends) if end < vocab] if is_short else [], -np.inf),
    )
    for change in found:
        if (change.at >= vocab).any():  # on a card they would change the next row's scores
            raise RequestFailed(f"token id {change.at.max()} is not one of the {vocab} that the model scores")
    return found


def joined(rows: Sequence[tuple[Change, ...]], vocab: int) -> list[Change]:
    """The changes of several rows as those of one tensor [rows * vocab]; a row without any is ()."""
    given = [(row * vocab, each) for row, each in enumerate(rows) if each]
    return [
        Change(
            np.concatenate([each[kind].at + first for first, each in given]),
            np.concatenate([each[kind].numbers for _, each in given]),
        )
        for kind in range(len(APPLIED) if given else 0)
    ]


def _add(scores: Tensor, at: Tensor, numbers: Tensor) -> None:
    scores.index_add_(0, at, numbers)


def _penalise(scores: Tensor, at: Tensor, numbers: Tensor) -> None:
    seen = scores.index_select(0, at)
    scores.index_copy_(0, at, where(seen < 0, seen * numbers, seen / numbers))  # an id twice: the same value twice


APPLIED = (_add, _penalise, _add, _add)


def adjust(scores: Tensor, changes: Sequence[Tensor]) -> None:
    """Adjust scores [rows, vocab], contiguous, in place by `joined` changes: the places and numbers of each in turn."""
    flat = scores.view(-1)
    for apply, at, numbers in zip(APPLIED, changes[::2], changes[1::2], strict=False):
        if len(at):
            apply(flat, at, numbers.to(flat.dtype))
