"""The trial at load, on real weights: a sound model passes, one whose attention is not passed on is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.config import Settings
from rekindle.errors import ModelRefused
from rekindle.model import trial
from rekindle.model.load import load_model
from rekindle.model.loaded import LoadedModel


@pytest.fixture(scope="module")
def loaded(real_file: Path) -> LoadedModel:
    """Each real model by its default settings, as `rekindle serve FILE` loads it."""
    settings = Settings.load({"model": str(real_file)})
    return load_model(settings.model, block_tokens=64, max_context=None, format_map_dir=None)


def test_a_real_model_is_served_by_default_settings(loaded: LoadedModel) -> None:
    assert loaded.promise == "bitwise"


def _scaled(call: Callable[..., Any], module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
    return call(module, q, k, v, mask, **{**given, "scaling": given["scaling"] * 1.5})


def _unmasked(call: Callable[..., Any], module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
    return call(module, q, k, v, torch.zeros_like(mask), **given)


def _shifted(call: Callable[..., Any], module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
    """Queries are one position late."""
    return call(module, q.roll(1, dims=2), k, v, mask, **given)


@pytest.mark.parametrize("wrong", [_scaled, _unmasked, _shifted])
def test_a_model_whose_own_attention_does_something_else_is_refused(
    loaded: LoadedModel, wrong: Callable[..., Any]
) -> None:
    """Its own attention, which the trial compares with, computes what is not passed on to ours."""
    code = vars(__import__(type(loaded.model).__module__, fromlist=["*"]))
    own = code["eager_attention_forward"]

    def changed(module: Any, q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        return wrong(own, module, q, k, v, mask, **given)

    code["eager_attention_forward"] = changed
    try:
        with pytest.raises(ModelRefused, match=r"other logits .* kernels=torch"):
            trial.trial_forward(loaded, loaded.dtype)
    finally:
        code["eager_attention_forward"] = own
