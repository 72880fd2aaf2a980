"""All rows of a step at once: the tokens of the definition, without a wait for the device, alone and in company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.model import drawing, drawn_rows
from rekindle.model.adjustments import History
from rekindle.model.choice import Cuts, by_id, by_rank
from rekindle.model.drawing import Drawing
from rekindle.model.params import SamplingParams
from rekindle.model.sampler import Draw, SamplerState
from tests.model.row_sampler import row_tokens

VOCAB = 40
ids = st.lists(st.integers(0, VOCAB - 1), max_size=9).map(lambda given: np.array(given, dtype=np.uint32))
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5, 1e300]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 41]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=2).map(
        lambda d: tuple(d.items())
    ),
    min_tokens=st.integers(0, 4),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
masks = st.none() | st.lists(st.booleans(), min_size=1, max_size=VOCAB + 3).map(lambda given: np.array(given))


@st.composite
def draws(draw: st.DrawFn, row: int) -> Draw:
    state = SamplerState.create(draw(params), lambda: draw(st.integers(0, 999)), eos_ids=frozenset({2, 5, VOCAB + 7}))
    return Draw(row, state, History(draw(ids), draw(ids)), draw(masks))


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of three rows, and so few candidates that all numbers of them are tried."""
    monkeypatch.setattr(drawn_rows, "CANDIDATES", {"cpu": (3, 8)})
    monkeypatch.setattr(drawing, "MOST_SCORES", {"cpu": 3 * VOCAB})


@pytest.mark.usefixtures("few_candidates")
@settings(max_examples=300, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999), are_rounded=st.booleans())
def test_tokens_are_those_of_the_definition(data: st.DataObject, seed: int, are_rounded: bool) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 3
    logits = logits.round() if are_rounded else logits
    before = logits.clone()
    given = [data.draw(draws(row), f"draw {row}") for row in data.draw(st.lists(st.integers(0, 3), max_size=6), "rows")]
    found = [None if drawn is None else drawn.token for drawn in Drawing(logits, given).results()]
    for draw, token in zip(given, found, strict=True):
        assert token in row_tokens(logits, draw, within=1e-9)
    assert torch.equal(logits, before), "the model's own logits stay as they are"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999))
def test_company_changes_no_token(data: st.DataObject, seed: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    given = [data.draw(draws(row), f"draw {row}") for row in range(3)]
    together = Drawing(logits, given).results()
    for draw, drawn in zip(given, together, strict=True):
        (alone,) = Drawing(logits, [draw]).results()
        assert (alone is None) == (drawn is None)
        if drawn is not None and alone is not None:
            assert alone.token == drawn.token and (alone.scores is None) == (drawn.scores is None)
            if drawn.scores is not None and alone.scores is not None:
                num_top = draw.state.params.logprobs
                told = drawn.scores.token(0, drawn.token, raw, num_top=num_top)
                assert told == alone.scores.token(0, alone.token, raw)
                assert told.logprob == pytest.approx(float(logits[draw.row].log_softmax(0)[drawn.token]), abs=1e-6)


def raw(token: int) -> bytes:
    return bytes([token])


class WithoutAnswers(TorchDispatchMode):
    """Refuses what a device cannot do before it has computed: numbers for the host, and shapes that depend on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, f"{func} waits for the device"
        assert torch.Tag.dynamic_output_shape not in func.tags, f"{func} waits for the device"
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert not any(at is not None and at.dtype == torch.bool for at in args[1]), "a mask waits for the device"
        return func(*args, **(kwargs or {}))


def every_kind() -> list[Draw]:
    """Draws of all kinds, and one with everything at once."""
    rules: Sequence[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_p": 0.9},
        {
            "top_p": 0.9,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": ((1, 3.0),),
            "min_tokens": 9,
            "logprobs": 0,
        },
    ]
    past, mask = History(np.arange(9, dtype=np.uint32), np.arange(4, dtype=np.uint32)), np.arange(VOCAB) % 2 == 1
    states = [SamplerState.create(SamplingParams(**each), lambda: 3, eos_ids=frozenset({7})) for each in rules]
    return [Draw(row, state, past, mask if row % 2 else None) for row, state in enumerate(states)]


def test_nothing_waits_for_the_device_before_results_are_wanted() -> None:
    logits, given = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0)), every_kind()
    with WithoutAnswers():
        launched = Drawing(logits, given)
    assert all(drawn is not None for drawn in launched.results())
    with pytest.raises(AssertionError, match="waits for the device"), WithoutAnswers():
        logits[0, 0].item()


def test_scores_in_single_draw_what_those_in_double_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cards have them: shares are known to about seven digits."""
    monkeypatch.setattr(drawn_rows, "DOUBLES", ())
    logits, given = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0)) * 3, every_kind()
    for seed in range(200):
        now = [replace(draw, state=replace(draw.state, seed=seed)) for draw in given]
        for draw, drawn in zip(now, Drawing(logits, now).results(), strict=True):
            assert drawn is not None and drawn.token in row_tokens(logits, draw, within=3e-6)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 3}, {"top_k": 3, "top_p": 0.4}, {"min_p": 0.2}, {}])
@pytest.mark.parametrize("temperature", [1e-300, 1e300])
def test_no_temperature_is_too_low_or_too_high_for_single(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], temperature: float
) -> None:
    monkeypatch.setattr(drawn_rows, "DOUBLES", ())
    state = SamplerState.create(SamplingParams(temperature=temperature, **params), lambda: 1)
    logits, mask = torch.arange(VOCAB, dtype=torch.float32)[None], np.arange(VOCAB) < 30
    (drawn,) = Drawing(logits, [Draw(0, state, mask=mask)]).results()
    assert drawn is not None and (drawn.token == 29 if temperature < 1 else drawn.token < 30)


@pytest.mark.parametrize(("drawn", "token"), [(0.0, 0), (0.4999, 0), (0.5, 1), (1 - 2**-53, 1)])
def test_a_share_begins_where_the_one_before_ends(drawn: float, token: int) -> None:
    scores, numbers = torch.tensor([[3.0, 3.0, -torch.inf, -torch.inf]]), [[1.0], [1.0], [0.0], [drawn]]
    cuts = Cuts(torch.tensor([[4]]), *(torch.tensor([each], dtype=torch.float64) for each in numbers))
    peaks = scores.amax(dim=1, keepdim=True)
    assert by_id(scores.clone(), peaks, cuts).tolist() == [token]
    assert [found.tolist() for found in by_rank(scores, peaks, cuts, count=3, is_limited=False)] == [[token], [True]]
