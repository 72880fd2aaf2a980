"""Models over weights that are packed for a card: the same layers in the same codes as on the processor.

In the interpreter outputs are cut to bf16 where a card rounds them, so logits are near those of the processor here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rekindle.compute.cpu.packed import PackedLinear, observed_linears, packed_weights
from rekindle.compute.cpu.packer import KernelPacker, Packer
from rekindle.compute.cpu.weights import Linears, Weights, WeightsChoice
from rekindle.errors import ConfigError
from rekindle.model.adapter import ATTENTION_NAME, register_attention
from rekindle.model.geometry import probe
from rekindle.model.trial import row_errors
from rekindle_cuda.packer import CardPacker
from rekindle_cuda.packing import CardWeights
from tests.cuda.test_attention import DEVICE
from tests.cuda.test_products import kernel, of_card, of_processor
from tests.kernels.native import needs_kernels
from tests.model.helpers import in_memory, random_ids, reference_logits
from tests.tiny_models import tiny_model

__all__ = ["kernel"]
pytestmark = needs_kernels
BF16 = torch.bfloat16
CARD = CardPacker(DEVICE)
ONE_LAYER = {"llama": {"num_hidden_layers": 1}, "qwen2": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}


@pytest.fixture
def processor(kernel: Any) -> KernelPacker:
    return KernelPacker(kernel)


def linears_of(model: Any, packer: Packer) -> Linears:
    """A tiny bf16 model in memory, and which of its layers a pass calls."""
    in_memory(model)
    with observed_linears(model) as called:
        probe(model)
    return Linears(model, called, packer)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ONE_LAYER)
def test_layers_are_those_of_the_processor(kind: str, weights: Weights, processor: KernelPacker) -> None:
    """Linear layers of every form and their codes; embeddings keep their values, a tied head is a copy in 8 bits."""
    ours, theirs = (
        tiny_model(kind, BF16, tie_word_embeddings=kind == "qwen2", vocab_size=96, **ONE_LAYER[kind]) for _ in range(2)
    )
    table = ours.get_input_embeddings().weight.clone()
    notes = [
        linears_of(model, packer).pack(WeightsChoice(weights)) for model, packer in ((ours, CARD), (theirs, processor))
    ]
    assert notes[0][0].split(",")[0] == notes[1][0].split(",")[0] and f"packed layers in {weights}" in notes[0][0]
    assert {each.device.type for each in ours.parameters()} == {DEVICE.type}
    embedding = ours.get_input_embeddings()
    assert type(embedding) is nn.Embedding and torch.equal(embedding.weight.cpu(), table)
    modules = dict(theirs.named_modules())
    packed = {path: module for path, module in ours.named_modules() if isinstance(module, PackedLinear)}
    assert packed.keys() == {path for path, module in modules.items() if isinstance(module, PackedLinear)}
    for path, module in packed.items():
        assert isinstance(module.packed, CardWeights) and module.weight.isnan().all()
        assert module.packed.format == modules[path].packed.format
        for one, other in zip(of_card(module.packed), of_processor(modules[path].packed), strict=True):
            width = slice(None) if one.ndim == 1 else (slice(None), slice(min(one.shape[1], other.shape[1])))
            np.testing.assert_array_equal(one[width], other[width])
    ids = random_ids(20, high=96)
    assert float(row_errors(reference_logits(ours, ids).cpu(), reference_logits(theirs, ids)).mean()) < 0.1


def test_experts_stay_as_they_are() -> None:
    """They are not for `padded_experts` where a card computes; a note has their bytes."""
    model = tiny_model("mixtral", BF16, num_hidden_layers=1, vocab_size=96)
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    with observed_linears(model) as called:
        probe(model)
    held = sum(each.nbytes for name, each in model.named_parameters() if "experts" in name)
    notes = Linears(model, called, CARD).pack(WeightsChoice("int8"))
    assert notes[-1] == f"weights: experts stay as they are, in {held:,} bytes" and held > 0


def test_what_no_format_suits_is_left_to_torch() -> None:
    deep = nn.Linear((1 << 16) + 1, 2, dtype=BF16)
    tiny = nn.Linear(64, 64, bias=False, dtype=BF16)
    with torch.no_grad():
        tiny.weight *= 2.0**-110  # int8 takes them for zeros
    model = nn.ModuleList([deep, tiny, nn.Linear(64, 64, dtype=BF16)])
    with observed_linears(model) as called:
        for each in model:
            each(torch.zeros(1, each.in_features, dtype=BF16))  # type: ignore[arg-type, operator]
    notes = Linears(model, called, CARD).pack(WeightsChoice("int8"))
    assert "0 keeps its weights in bf16: it is too deep for others" in notes
    assert "1 is left to torch: our kernel gives other outputs" in notes
    assert [type(each) for each in model] == [nn.Linear, nn.Linear, PackedLinear]
    assert len(list(packed_weights(model))) == 1
    wide = nn.ModuleList([nn.Linear(64, 64)])
    with pytest.raises(ConfigError, match="weights=int4 has no effect on this model"):
        Linears(wide, set(), CARD).pack(WeightsChoice("int4"))
