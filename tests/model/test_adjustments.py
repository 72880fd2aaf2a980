"""Bias, penalties, barred ends and min-p: against the formulas written out, and against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rekindle.errors import RequestFailed
from rekindle.model.adjustments import History, adjust, changes, joined
from rekindle.model.params import SamplingParams
from rekindle.model.sampler import SamplerState
from tests.model.row_sampler import by_the_formulas, sample

VOCAB = 12
ids_of = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def history(prompt: list[int], reply: list[int]) -> History:
    return History(np.asarray(prompt, dtype=np.uint32), np.asarray(reply, dtype=np.uint32))


def state(ends: frozenset[int] = frozenset(), seed: int = 0, **params: Any) -> SamplerState:
    return SamplerState.create(SamplingParams(**params), lambda: seed, eos_ids=ends)


def adjusted(scores: torch.Tensor, params: SamplingParams, past: History, ends: frozenset[int]) -> torch.Tensor:
    """One row of scores, adjusted in place between two others."""
    rows = scores.repeat(3, 1)
    told = joined([(), changes(params, past, ends, len(scores)), ()], len(scores))
    adjust(rows, [torch.from_numpy(array) for change in told for array in (change.at, change.numbers)])
    assert torch.equal(rows[0], scores) and torch.equal(rows[2], scores)
    return rows[1]


@settings(max_examples=150, deadline=None)
@given(
    scores=st.lists(st.floats(-9, 9), min_size=VOCAB, max_size=VOCAB),
    prompt=ids_of,
    reply=ids_of,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 6),
)
def test_scores_change_by_the_formulas(
    scores: list[float],
    prompt: list[int],
    reply: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
        min_tokens=min_tokens,
    )
    ends = frozenset({2, 5})
    before = torch.tensor(scores, dtype=torch.float64)
    after = adjusted(before, params, history(prompt, reply), ends)
    expected = by_the_formulas(before, params, history(prompt, reply), ends)
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(prompt=ids_of, reply=ids_of, penalty=st.sampled_from([0.7, 1.2, 3.0]), seed=st.integers(0, 99))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], reply: list[int], penalty: float, seed: int
) -> None:
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = adjusted(scores, SamplingParams(repetition_penalty=penalty), history(prompt, reply), frozenset())
    seen = torch.tensor([prompt + reply], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(seen, scores[None].clone())
    assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("length", [0, 2, 3])
def test_ends_are_barred_as_transformers_bars_them(length: int) -> None:
    scores, reply = torch.zeros(VOCAB, dtype=torch.float64), [1] * length
    ours = adjusted(scores, SamplingParams(min_tokens=3), history([7, 8], reply), frozenset({4}))
    barring = MinNewTokensLengthLogitsProcessor(2, 3, [4], device="cpu")
    assert torch.equal(ours, barring(torch.tensor([[7, 8, *reply]]), scores[None].clone())[0])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 9]),
    top_p=st.sampled_from([0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_what_may_be_drawn_is_what_transformers_leaves(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    theirs, none = TemperatureLogitsWarper(temperature)(torch.zeros(1, 0), logits.clone()), torch.zeros(1, 0)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(none, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(none, theirs)
    if min_p:
        theirs = MinPLogitsWarper(min_p)(none, theirs)
    weights = theirs.softmax(-1)[0]
    drawing = state(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    seen = {sample(logits, [drawing], [history([], [0] * at)])[0] for at in range(150)}
    assert all(weights[token] > 0 for token in seen)
    assert all(token in seen for token in range(40) if weights[token] > 0.1), "a likely token never came"


def test_greedy_rows_follow_the_changed_scores_and_others_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(4, 1)
    plain = state(temperature=0.0)
    states = [
        plain,
        state(temperature=0.0, logit_bias=((0, 9.0),)),
        state(temperature=0.0, frequency_penalty=1.0),
        state(ends=frozenset({1}), temperature=0.0, min_tokens=2),
    ]
    pasts = [history([], [1, 1])] * 3 + [history([], [0])]
    assert sample(logits, states, pasts) == [1, 0, 2, 2]
    assert [sample(logits[:1], [each], [past])[0] for each, past in zip(states, pasts, strict=True)] == [1, 0, 2, 2]
    assert not plain.needs_history and not state().needs_history


def test_penalties_look_at_nothing_but_the_request_itself() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    rules = {"presence_penalty": 1.5, "repetition_penalty": 1.4, "seed": 5}
    states, pasts = (
        [state(**rules), state(seed=6), state(**rules)],
        [history([1], [2, 2]), history([3], []), history([], [4])],
    )
    together = sample(logits, states, pasts)
    assert together == [sample(logits[i : i + 1], [states[i]], [pasts[i]])[0] for i in range(3)]
    assert together[::-1] == sample(logits.flip(0), states[::-1], pasts[::-1])


def test_an_ignored_end_is_a_token_like_others_and_a_stop_token_ends_all_the_same() -> None:
    eos = frozenset({3})
    assert state(ends=eos).ends == {3}
    assert state(ends=eos, ignore_eos=True, stop_token_ids=(7,)).ends == {7}
    assert state(ends=eos, stop_token_ids=(7,)).ends == {3, 7}


def test_a_row_of_which_nothing_may_come_fails_alone() -> None:
    barred = state(ends=frozenset(range(4)), min_tokens=1)
    assert sample(torch.zeros(2, 4), [barred, state(temperature=0.0)]) == [None, 0]


@pytest.mark.parametrize("rules", [{"logit_bias": ((4, 1.0),)}, {"repetition_penalty": 2.0}, {"presence_penalty": 1.0}])
def test_ids_outside_of_the_vocabulary_change_no_other_row(rules: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed, match="token id 4 is not one of the 4"):
        sample(torch.zeros(2, 4), [state(**rules), state()], [history([], [4])] * 2)
