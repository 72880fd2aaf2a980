"""The trial at load, on real weights: a sound model passes, one whose attention is not passed on is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.errors import ModelRefused
from rekindle.model import trial
from rekindle.model.loaded import LoadedModel
from tests.model.own_mutants import changed_attention


@pytest.fixture(scope="module")
def tried(loaded: LoadedModel) -> LoadedModel:
    """The model as the trial is given it: with packed weights and native KV."""
    layout = loaded.spec.layout
    layers = tuple(replace(layer, k_format="bf16", v_format="bf16") for layer in layout.layers)
    return replace(loaded, spec=replace(loaded.spec, layout=replace(layout, layers=layers)))


@pytest.mark.parametrize("kind", ["mask", "scale", "position", "window", "rotation"])  # the others are of no layer here
def test_a_model_whose_own_attention_does_something_else_is_refused(tried: LoadedModel, kind: str) -> None:
    """Its own attention, which the trial compares with, computes what is not passed on to ours."""
    windows = any(layer.window for layer in tried.spec.layout.layers)
    with changed_attention(tried, kind) as calls:
        if kind == "window" and not windows:
            trial.trial_forward(tried, tried.dtype)
            assert not calls
        else:
            with pytest.raises(ModelRefused, match=r"other results .* attention call .*kernels=torch .*dtype=fp32"):
                trial.trial_forward(tried, tried.dtype)
            assert calls
