"""Sampling: the same request draws the same tokens in every batch; top-k and top-p keep exactly the right ids."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rekindle.errors import BadRequest
from rekindle.model.adjustments import History
from rekindle.model.params import SamplingKeywords, SamplingParams
from rekindle.model.sampler import SamplerState
from tests.model.row_sampler import sample


def state(seed: int = 0, **params: Any) -> SamplerState:
    return SamplerState.create(SamplingParams(**params), lambda: seed)


def at(index: int) -> list[History]:
    """The place of token `index` of one reply."""
    return [History(np.zeros(0, dtype=np.uint32), np.zeros(index, dtype=np.uint32))]


def drawn(logits: torch.Tensor, state: SamplerState, count: int) -> list[int | None]:
    """`count` draws from the same row, as tokens 0, 1, ... of one reply."""
    return [sample(logits, [state], at(index))[0] for index in range(count)]


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": tuple(map(str, range(65)))}, "stop"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": "0.1"}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"repetition_penalty": 1e308}, "repetition_penalty"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop"),
        ({"stop_token_ids": 1}, "stop_token_ids"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"logit_bias": [[1, 1.0]]}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ],
)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param == param and param in str(caught.value)


def test_one_text_and_lists_are_taken_as_tuples() -> None:
    one = SamplingParams(stop="x", stop_token_ids=[1, 2], logit_bias=[(1, 2.0)])
    assert one == SamplingParams(stop=["x"], stop_token_ids=(1, 2), logit_bias=((1, 2.0),))
    assert (one.stop, one.stop_token_ids, one.logit_bias) == (("x",), (1, 2), ((1, 2.0),)) and hash(one)


def test_keywords_for_type_checkers_are_the_fields() -> None:
    assert get_type_hints(SamplingKeywords) == get_type_hints(SamplingParams)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [state(temperature=0.0), state(temperature=0.7, top_k=1)]) == [1, 0]
    assert sample(logits[:0], []) == []


def test_tokens_do_not_depend_on_the_batch_or_on_other_requests() -> None:
    logits = random_logits(5, 97)
    greedy = {"temperature": 0.0}
    params = [{"temperature": 0.8, "seed": 5}, greedy, {"top_k": 7, "seed": 5}, {"top_p": 0.6, "seed": 9}, {}]
    together = sample(logits, [state(**p) for p in params])
    assert together == [sample(logits[i : i + 1], [state(**p)])[0] for i, p in enumerate(params)]
    order = [3, 0, 4, 2, 1]
    shuffled = sample(logits[order], [state(**params[i]) for i in order])
    assert shuffled == [together[i] for i in order]


def test_a_preempted_request_draws_the_same_numbers_again() -> None:
    logits = random_logits(20, 97)
    tokens = [sample(logits[i : i + 1], [state(seed=3)], at(i))[0] for i in range(20)]
    assert [sample(logits[i : i + 1], [state(seed=3)], at(i))[0] for i in range(12, 20)] == tokens[12:]
    assert tokens != [sample(logits[i : i + 1], [state(seed=4)], at(i))[0] for i in range(20)]


def naive_support(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Top-k, then the smallest set of the most likely ids with at least `top_p`; ties to the lowest id."""
    scores = [x / temperature for x in logits]
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    weights = torch.softmax(torch.tensor([scores[i] for i in ranked], dtype=torch.float64), 0).tolist()
    kept, mass = set(), 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if mass >= top_p and top_p < 1:
            break
        kept.add(token)
        mass += weight
    return kept


@example(logits=[1.0, 1.0], temperature=1.0, top_k=0, top_p=0.5)
@example(logits=[0.0, 2.0, 2.0, 2.0], temperature=1.0, top_k=2, top_p=1.0)
@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.37, 0.5, 0.9, 1.0]),
)
def test_only_ids_inside_top_k_and_top_p_are_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    support = naive_support(logits, temperature, top_k, top_p)
    rows = torch.tensor([logits])
    seen = set(drawn(rows, state(seed=1, temperature=temperature, top_k=top_k, top_p=top_p), 60))
    assert seen <= support


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97])
def test_the_nucleus_of_a_large_vocabulary_is_the_naive_one(spread: float, top_p: float) -> None:
    logits = (random_logits(1, 3000) * spread).round(decimals=1)
    support = naive_support(logits[0].double().tolist(), 1.0, 0, top_p)
    seen = set(drawn(logits, state(seed=2, top_p=top_p), 100))
    assert seen <= support
    if len(support) <= 3:
        assert seen == support


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.zeros(4)
    for token in drawn(logits, state(seed=11, temperature=0.7), 4000):
        counts[token] += 1
    expected = torch.softmax(logits[0] / 0.7, 0) * 4000
    assert float(((counts - expected).square() / expected).sum()) < 16.3  # chi-square, 3 degrees, p = 0.001


def test_a_seed_may_be_negative_and_entropy_is_asked_only_without_one() -> None:
    asked: list[int] = []
    made = SamplerState.create(SamplingParams(seed=-5), lambda: asked.append(1) or 7)
    assert made.seed == -5 and not asked
    assert SamplerState.create(SamplingParams(), lambda: 7).seed == 7
    assert 0 <= made.draw(0) < 1 and made.draw(0) != made.draw(1)


def test_nothing_is_drawn_from_logits_that_are_not_finite() -> None:
    for params in ({}, {"top_p": 0.5}, {"top_k": 2}, {"temperature": 0.0}):
        for bad in (float("nan"), float("inf")):
            assert sample(torch.tensor([[1.0, bad, 2.0, 3.0]]), [state(**params)]) == [None]


def test_float64_logits_are_used_as_they_are() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert sample(logits, [state(temperature=0.0)]) == [1]
