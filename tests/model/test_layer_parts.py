"""Parts of layers over torch's own linear layers: what any device builds from, found without kernels or packed weights.

What the kernels build of them is in test_decoder, test_fused_modules and test_mixtures.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rekindle.layer_forms import Gate, Shares
from rekindle.model.compare import random_rows, same_results
from rekindle.model.layer_parts import (
    LayerParts,
    MixtureParts,
    MlpParts,
    gate_of,
    layer_parts,
    may_be_layer,
    mlp_parts,
)
from rekindle.model.observation import observed
from tests.model.helpers import in_memory, randomise_norms
from tests.tiny_models import tiny_model

BF16 = torch.bfloat16
NORMS = {
    "llama": {"input", "mlp"},
    "qwen3": {"input", "mlp", "q", "k"},
    "gemma2": {"input", "mlp", "attention_output", "mlp_output"},
    "gemma3": {"input", "mlp", "attention_output", "mlp_output", "q", "k"},
}
MIXTURES = {
    "mixtral": (Gate("silu"), Shares(True, "fp32")),
    "qwen3-moe": (Gate("silu"), Shares(False, "bf16")),
    "gpt-oss": (Gate("swish", True, 7.0, 1.702), Shares(True, "bf16")),
}


def is_linear(module: Any) -> bool:
    return type(module) is nn.Linear


def parts_of(kind: str) -> list[LayerParts | None]:
    """The parts of every layer of a tiny model that may have some."""
    model = tiny_model(kind, BF16)
    randomise_norms(model)
    loaded = in_memory(model)
    specs = {layer.index: layer for layer in loaded.spec.layout.layers}
    with torch.inference_mode():
        seen = observed(loaded, [module for module in model.modules() if may_be_layer(module, is_linear)])
        return [layer_parts(each, one.call, specs[one.call.layer_index], is_linear) for each, (one, _) in seen.items()]


@pytest.mark.parametrize("kind", NORMS)
def test_a_layer_has_its_norms_projections_and_mlp(kind: str) -> None:
    found = parts_of(kind)
    assert len(found) == 3
    for parts in found:
        assert parts is not None and isinstance(parts.mlp, MlpParts)
        assert (parts.size, parts.heads, parts.norms.keys()) == (64, 4, NORMS[kind])
        assert parts.projections[3] is parts.module.self_attn.o_proj
        with torch.inference_mode():
            rows = random_rows(64)
            assert torch.equal(parts.mlp.computed(rows), parts.module.mlp(rows))
            assert all(
                same_results(norm.computed(random_rows(norm.columns)), norm.module(random_rows(norm.columns)))
                for norm in parts.norms.values()
            )


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_has_its_gate_and_router(kind: str) -> None:
    found = parts_of(kind)
    assert len(found) == 3
    for parts in found:
        assert parts is not None and isinstance(parts.mlp, MixtureParts)
        assert (gate_of(parts.mlp.experts), parts.mlp.router.shares) == MIXTURES[kind]


def test_what_is_no_linear_layer_to_the_device_has_no_parts() -> None:
    mlp = tiny_model("llama", BF16).model.layers[0].mlp
    assert mlp_parts(mlp, is_linear, BF16) is not None
    assert mlp_parts(mlp, lambda module: is_linear(module) and module is not mlp.up_proj, BF16) is None
