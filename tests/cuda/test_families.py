"""How the families of `rekindle models` run on a card, as far as that shows without one.

Models without values (torch's device `meta`) stand for those on a card: what a graph cannot hold fails on them as it
does there, or is refused here.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rekindle.model.adapter import AttentionCall, run_model
from rekindle.model.loaded import LoadedModel
from rekindle_cuda.graphs import can_be_recorded
from tests.engine.test_families import ALL, OF_EACH_KIND, family_of
from tests.model.helpers import in_memory
from tests.tiny_models import tiny_model

META = torch.device("meta")
OTHERS = {"mistral3-mistral4": "torch"}  # than the others of their row
CHOSEN = ALL if os.environ.get("FAMILIES") == "all" else [*OF_EACH_KIND, "gemma4", "gpt-oss", "phi3", "kimi-linear"]


class NothingSent(TorchFunctionMode):
    """Refuses tensors that are made of Python's numbers or come from the processor: a graph would send the same ones
    for every step."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device == META:
            if function in (torch.tensor, torch.as_tensor, torch.from_numpy):
                raise RuntimeError(f"numbers of Python are sent: {args}")
            if any(isinstance(arg, torch.Tensor) and arg.device != META and arg.dim() for arg in args):
                raise RuntimeError(f"a tensor of the processor is sent: {function}")
        return found


class AnyAttention:
    """Takes K and V, and gives values of the right shape."""

    recurrent = states = None

    def __init__(self, loaded: LoadedModel) -> None:
        self.sizes = {layer.index: layer.out_dim for layer in loaded.spec.layout.layers}

    def write(self, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert k.device == v.device == META

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.q.new_empty(*call.q.shape[:2], self.sizes[call.kv_index])


def on_card(kind: str) -> LoadedModel:
    """A tiny model without values."""
    loaded = in_memory(tiny_model(kind, torch.bfloat16), padded=False)
    loaded.model.to(META)
    return loaded


def run_without_values(loaded: LoadedModel) -> torch.Tensor:
    """Logits of a second step of 8 rows, 4 of them asked for; the first one may send what stays on a card."""
    ids, positions = (torch.zeros(1, 8, dtype=torch.int64, device=META) for _ in range(2))
    rows = torch.zeros(4, dtype=torch.int64, device=META)
    with torch.inference_mode():
        run_model(loaded.model, AnyAttention(loaded), ids, positions, rows)
        with NothingSent():
            return run_model(loaded.model, AnyAttention(loaded), ids, positions, rows)


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_family_runs_on_a_card_as_its_row_says(kind: str) -> None:
    loaded = on_card(kind)
    are_latent = any(layer.latent for layer in loaded.spec.layout.layers)
    found = "torch" if are_latent else "graphs" if can_be_recorded(loaded) else "kernels"
    assert found == OTHERS.get(kind, family_of(kind).on_card)
    if found == "graphs":
        loaded.model.config.pad_token_id = None  # of GPT-2, which looks for it among the ids; no such model has one
        assert run_without_values(loaded).shape == (4, loaded.spec.vocab_size)


def test_long_factors_of_rotary_embeddings_stay_on_a_card() -> None:
    loaded = on_card("phi3-longrope")
    assert run_without_values(loaded).shape == (4, loaded.spec.vocab_size)


def test_a_model_whose_rotary_factors_depend_on_the_ids_is_seen() -> None:
    loaded = on_card("llama-dynamic")
    with pytest.raises(RuntimeError, match="item"):
        run_without_values(loaded)


def test_numbers_that_are_sent_are_seen() -> None:
    with NothingSent(), pytest.raises(RuntimeError, match="numbers of Python are sent"):
        torch.tensor([1, 2], device=META)
    with NothingSent(), pytest.raises(RuntimeError, match="a tensor of the processor is sent"):
        torch.ones(2).to(META)
